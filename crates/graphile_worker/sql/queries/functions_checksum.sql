-- A checksum of the installed SQL functions, whichever program installed them. It includes the schema's name: after a schema was
-- renamed, its functions still use the old name.
select md5(string_agg(
  pg_catalog.concat_ws(E'\x01', :'schema', proname, prosrc, proconfig::text, prosecdef), E'\x02' order by proname, prosrc
))
from pg_proc
where pronamespace = (select oid from pg_namespace where nspname = :'schema') and proname in (
  'add_job', 'add_jobs', 'remove_job', 'complete_jobs', 'permanently_fail_jobs', 'reschedule_jobs',
  'force_unlock_workers', '_rs_job_problem', '_rs_job_names', '_rs_flags_object', '_rs_give_up', '_rs_task_id', '_rs_job_queue_id',
  '_rs_json_arrays_joined', '_rs_next_job_id', '_rs_sweep_lock', '_rs_dead_workers', '_rs_recover_jobs',
  '_rs_forget_workers', '_rs_sweep_stale_workers', '_rs_notify_jobs', '_rs_put_keyed_job', '_rs_may_administer', '_rs_is_removed',
  '_rs_next_job_ids', '_rs_task_ids', '_rs_job_queue_ids', '_rs_put_keyed_jobs',
  '_rs_hold_name', '_rs_verify_name', '_rs_known_names', '_rs_delete_unused_names',
  '_rs_limit_problem', '_rs_notify_limits', '_rs_limit_of_queue', '_rs_lane_of_queue', '_rs_lane_of_task', '_rs_lane',
  '_rs_call_lanes', '_rs_set_limit', '_rs_apply_limit', '_rs_drop_limit', '_rs_pause', '_rs_resume', '_rs_settle_lanes',
  '_rs_drain_old_queue', '_rs_dissolve_lane', '_rs_delete_idle_lanes', '_rs_room', '_rs_slots_in_use', '_rs_report_of_lanes', '_rs_is_same_claim', '_rs_claim_from_lanes',
  '_rs_limits_of_job', '_rs_probe', '_rs_note_outcomes', '_rs_apply_outcomes', '_rs_state_after_outcomes', '_rs_open_limit',
  '_rs_end_pause', '_rs_adds_as_owner', '_rs_add_job_as_owner', '_rs_add_jobs_as_owner',
  '_rs_is_cancelled', '_rs_cancel_jobs', '_rs_can_cancel',
  '_rs_expire_job', '_rs_expire_jobs', '_rs_expire_own_jobs', '_rs_expire_due_jobs',
  '_rs_debounce', '_rs_debounce_as_owner', '_rs_throttle', '_rs_throttle_as_owner',
  '_rs_replace_job', '_rs_replace_job_as_owner', '_rs_release_successors'
);
