//! What Node's release installs and what we install are the same, but for what is ours.

#![allow(missing_docs)]

use graphile_worker_interop::Db;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Every object of the schema that users or programs can see, by name, with all that matters of it.
const CATALOG: &str = r#"
with everything (name, definition) as (
  select 'table ' || relname, json_build_object('kind', relkind, 'row security', relrowsecurity, 'forced', relforcerowsecurity)
  from pg_class where relnamespace = 'graphile_worker'::regnamespace and relkind in ('r', 'v', 'm', 'p')
  union all
  select 'column ' || relname || '.' || attname, json_build_object(
    'position', row_number() over (partition by attrelid order by attnum),
    'type', format_type(atttypid, atttypmod), 'not null', attnotnull, 'identity', attidentity, 'generated', attgenerated,
    'default', pg_get_expr(adbin, adrelid))
  from pg_attribute
  join pg_class on pg_class.oid = attrelid
  left join pg_attrdef on adrelid = attrelid and adnum = attnum
  where relnamespace = 'graphile_worker'::regnamespace and relkind in ('r', 'v', 'c') and attnum > 0 and not attisdropped
  union all
  select 'constraint ' || conrelid::regclass || ' ' || conname, to_json(pg_get_constraintdef(oid))
  from pg_constraint where connamespace = 'graphile_worker'::regnamespace and contype <> 'n'
  union all
  select 'index ' || indexrelid::regclass, to_json(pg_get_indexdef(indexrelid))
  from pg_index join pg_class on pg_class.oid = indrelid where relnamespace = 'graphile_worker'::regnamespace
  union all
  select 'function ' || proname, json_build_object(
    'arguments', pg_get_function_arguments(oid), 'result', pg_get_function_result(oid), 'kind', prokind,
    'strict', proisstrict, 'volatility', provolatile, 'security definer', prosecdef, 'rights', proacl::text)
  from pg_proc where pronamespace = 'graphile_worker'::regnamespace
  union all
  select 'view ' || relname, to_json(pg_get_viewdef(oid))
  from pg_class where relnamespace = 'graphile_worker'::regnamespace and relkind = 'v'
  union all
  select 'trigger ' || tgrelid::regclass || ' ' || tgname, to_json(pg_get_triggerdef(pg_trigger.oid))
  from pg_trigger join pg_class on pg_class.oid = tgrelid where relnamespace = 'graphile_worker'::regnamespace
  union all
  select 'policy ' || polname, to_json(polrelid::regclass::text) from pg_policy
  union all
  select 'ledger ' || id, json_build_object('breaking', breaking) from graphile_worker.migrations
)
select json_object_agg(name, definition) from everything
"#;

/// What we add to the contract, all of it.
const OURS: [&str; 241] = [
    "column _rs_additions.breaking",
    "column _rs_additions.checksum",
    "column _rs_additions.id",
    "column _rs_additions.ts",
    "column _rs_additions.wanted_until",
    "column _rs_cancellations.force",
    "column _rs_cancellations.job_id",
    "column _rs_cancellations.key",
    "column _rs_cancellations.requested_at",
    "column _rs_cancellations.requested_by",
    "column _rs_crontab_items.identifier",
    "column _rs_crontab_items.item",
    "column _rs_crontab_items.since",
    "column _rs_expiries.check_at",
    "column _rs_expiries.expires_at",
    "column _rs_expiries.job_id",
    "column _rs_lane_calls.id",
    "column _rs_lane_calls.lane_id",
    "column _rs_lanes.closed_until",
    "column _rs_lanes.counted_from",
    "column _rs_lanes.failures",
    "column _rs_lanes.id",
    "column _rs_lanes.idle_since",
    "column _rs_lanes.is_new",
    "column _rs_lanes.limit_id",
    "column _rs_lanes.mean_ms",
    "column _rs_lanes.old_queue_id",
    "column _rs_lanes.queue_name",
    "column _rs_lanes.ready_at",
    "column _rs_lanes.started_at",
    "column _rs_lanes.task_id",
    "column _rs_lanes.tat",
    "column _rs_lanes.tripped_at",
    "column _rs_lanes.turn",
    "column _rs_lanes.waits_for",
    "column _rs_limit_outcomes.claimed_at",
    "column _rs_limit_outcomes.closed_until",
    "column _rs_limit_outcomes.failures",
    "column _rs_limit_outcomes.has_succeeded",
    "column _rs_limit_outcomes.id",
    "column _rs_limit_outcomes.lane_id",
    "column _rs_limit_outcomes.limit_id",
    "column _rs_limit_outcomes.tokens",
    "column _rs_limits.burst",
    "column _rs_limits.closed_until",
    "column _rs_limits.concurrency",
    "column _rs_limits.cost",
    "column _rs_limits.counted_from",
    "column _rs_limits.failures",
    "column _rs_limits.group_id",
    "column _rs_limits.id",
    "column _rs_limits.is_dropped",
    "column _rs_limits.name",
    "column _rs_limits.paused_at",
    "column _rs_limits.paused_by",
    "column _rs_limits.paused_until",
    "column _rs_limits.per",
    "column _rs_limits.prefix",
    "column _rs_limits.rate",
    "column _rs_limits.started_at",
    "column _rs_limits.task_id",
    "column _rs_limits.tat",
    "column _rs_limits.trip",
    "column _rs_limits.trip_for",
    "column _rs_limits.tripped_at",
    "column _rs_limits.weight",
    "column _rs_recoveries.job_id",
    "column _rs_recoveries.last_at",
    "column _rs_recoveries.times",
    "column _rs_slots.lane_id",
    "column _rs_slots.slots",
    "column _rs_slots.worker_id",
    "column _rs_successors.job_id",
    "column _rs_successors.predecessor_ids",
    "column _rs_successors.run_at",
    "column _rs_throttles.ends_at",
    "column _rs_throttles.key",
    "column _rs_throttles.starts_at",
    "column _rs_workers.heartbeat_interval",
    "column _rs_workers.host",
    "column _rs_workers.last_heartbeat_at",
    "column _rs_workers.level",
    "column _rs_workers.pid",
    "column _rs_workers.settings",
    "column _rs_workers.slots",
    "column _rs_workers.started_at",
    "column _rs_workers.swept_at",
    "column _rs_workers.tasks",
    "column _rs_workers.version",
    "column _rs_workers.worker_id",
    "constraint graphile_worker._rs_additions _rs_additions_pkey",
    "constraint graphile_worker._rs_cancellations _rs_cancellations_pkey",
    "constraint graphile_worker._rs_crontab_items _rs_crontab_items_pkey",
    "constraint graphile_worker._rs_expiries _rs_expiries_pkey",
    "constraint graphile_worker._rs_lane_calls _rs_lane_calls_pkey",
    "constraint graphile_worker._rs_lanes _rs_lanes_pkey",
    "constraint graphile_worker._rs_limit_outcomes _rs_limit_outcomes_pkey",
    "constraint graphile_worker._rs_limits _rs_limits_burst_check",
    "constraint graphile_worker._rs_limits _rs_limits_concurrency_check",
    "constraint graphile_worker._rs_limits _rs_limits_cost_check",
    "constraint graphile_worker._rs_limits _rs_limits_name_key",
    "constraint graphile_worker._rs_limits _rs_limits_per_check",
    "constraint graphile_worker._rs_limits _rs_limits_pkey",
    "constraint graphile_worker._rs_limits _rs_limits_rate_check",
    "constraint graphile_worker._rs_limits _rs_limits_trip_check",
    "constraint graphile_worker._rs_limits _rs_limits_trip_for_check",
    "constraint graphile_worker._rs_limits _rs_limits_weight_check",
    "constraint graphile_worker._rs_recoveries _rs_recoveries_pkey",
    "constraint graphile_worker._rs_slots _rs_slots_pkey",
    "constraint graphile_worker._rs_successors _rs_successors_pkey",
    "constraint graphile_worker._rs_throttles _rs_throttles_pkey",
    "constraint graphile_worker._rs_workers _rs_workers_pkey",
    "function _rs_add_job_as_owner",
    "function _rs_add_jobs_as_owner",
    "function _rs_adds_as_owner",
    "function _rs_apply_limit",
    "function _rs_apply_outcomes",
    "function _rs_call_lanes",
    "function _rs_can_cancel",
    "function _rs_cancel_jobs",
    "function _rs_check_new_lanes",
    "function _rs_claim_from_lanes",
    "function _rs_dead_workers",
    "function _rs_debounce",
    "function _rs_debounce_as_owner",
    "function _rs_delete_idle_lanes",
    "function _rs_delete_unused_names",
    "function _rs_dissolve_lane",
    "function _rs_drain_old_queue",
    "function _rs_drop_limit",
    "function _rs_end_pause",
    "function _rs_expire_due_jobs",
    "function _rs_expire_job",
    "function _rs_expire_jobs",
    "function _rs_expire_own_jobs",
    "function _rs_flags_object",
    "function _rs_forget_workers",
    "function _rs_give_up",
    "function _rs_hold_name",
    "function _rs_is_cancelled",
    "function _rs_is_removed",
    "function _rs_is_same_claim",
    "function _rs_job_names",
    "function _rs_job_problem",
    "function _rs_job_queue_id",
    "function _rs_job_queue_ids",
    "function _rs_json_arrays_joined",
    "function _rs_keep_used_queue",
    "function _rs_keep_used_task",
    "function _rs_known_names",
    "function _rs_lane",
    "function _rs_lane_of_queue",
    "function _rs_lane_of_task",
    "function _rs_limit_of_queue",
    "function _rs_limit_problem",
    "function _rs_limits_of_job",
    "function _rs_lock_of_queue_limits",
    "function _rs_may_administer",
    "function _rs_name_bucket",
    "function _rs_next_job_id",
    "function _rs_next_job_ids",
    "function _rs_note_outcomes",
    "function _rs_notify_deleted_tasks",
    "function _rs_notify_jobs",
    "function _rs_notify_limits",
    "function _rs_open_limit",
    "function _rs_pause",
    "function _rs_probe",
    "function _rs_put_keyed_job",
    "function _rs_put_keyed_jobs",
    "function _rs_recover_jobs",
    "function _rs_release_successors",
    "function _rs_replace_job",
    "function _rs_replace_job_as_owner",
    "function _rs_report_of_lanes",
    "function _rs_resume",
    "function _rs_room",
    "function _rs_set_limit",
    "function _rs_settle_lanes",
    "function _rs_slots_in_use",
    "function _rs_state_after_outcomes",
    "function _rs_sweep_lock",
    "function _rs_sweep_stale_workers",
    "function _rs_task_id",
    "function _rs_task_ids",
    "function _rs_throttle",
    "function _rs_throttle_as_owner",
    "function _rs_verify_name",
    "index graphile_worker._rs_additions_pkey",
    "index graphile_worker._rs_cancellations_by_key",
    "index graphile_worker._rs_cancellations_pkey",
    "index graphile_worker._rs_crontab_items_pkey",
    "index graphile_worker._rs_expiries_by_time",
    "index graphile_worker._rs_expiries_pkey",
    "index graphile_worker._rs_jobs_by_kind",
    "index graphile_worker._rs_jobs_by_queue",
    "index graphile_worker._rs_jobs_failed_in_lanes",
    "index graphile_worker._rs_jobs_in_queues",
    "index graphile_worker._rs_jobs_in_queues_by_task",
    "index graphile_worker._rs_jobs_in_use",
    "index graphile_worker._rs_jobs_unqueued",
    "index graphile_worker._rs_lane_calls_by_lane",
    "index graphile_worker._rs_lane_calls_pkey",
    "index graphile_worker._rs_lanes_closed",
    "index graphile_worker._rs_lanes_due",
    "index graphile_worker._rs_lanes_idle",
    "index graphile_worker._rs_lanes_new",
    "index graphile_worker._rs_lanes_of_queues",
    "index graphile_worker._rs_lanes_of_tasks",
    "index graphile_worker._rs_lanes_open",
    "index graphile_worker._rs_lanes_pkey",
    "index graphile_worker._rs_lanes_waiting",
    "index graphile_worker._rs_limit_outcomes_of_lanes",
    "index graphile_worker._rs_limit_outcomes_of_limits",
    "index graphile_worker._rs_limit_outcomes_pkey",
    "index graphile_worker._rs_limits_name_key",
    "index graphile_worker._rs_limits_of_tasks",
    "index graphile_worker._rs_limits_pkey",
    "index graphile_worker._rs_limits_with_breakers",
    "index graphile_worker._rs_recoveries_pkey",
    "index graphile_worker._rs_slots_pkey",
    "index graphile_worker._rs_successors_pkey",
    "index graphile_worker._rs_throttles_by_end",
    "index graphile_worker._rs_throttles_pkey",
    "index graphile_worker._rs_workers_pkey",
    "table _rs_additions",
    "table _rs_cancellations",
    "table _rs_crontab_items",
    "table _rs_expiries",
    "table _rs_lane_calls",
    "table _rs_lanes",
    "table _rs_limit_outcomes",
    "table _rs_limits",
    "table _rs_recoveries",
    "table _rs_slots",
    "table _rs_successors",
    "table _rs_throttles",
    "table _rs_workers",
    "trigger graphile_worker._private_job_queues _rs_keep_used_queue",
    "trigger graphile_worker._private_tasks _rs_keep_used_task",
    "trigger graphile_worker._private_tasks _rs_notify_deleted_tasks",
];

async fn catalog(db: &Db) -> BTreeMap<String, Value> {
    serde_json::from_value(db.value(CATALOG).await).expect("an object")
}

#[tokio::test]
async fn our_catalog_is_nodes_plus_what_is_listed_here() {
    let nodes = catalog(&Db::nodes("graphile-worker").await).await;
    let mut ours = catalog(&Db::ours().await).await;
    assert!(nodes.len() > 80, "the query found the catalog");

    let added: Vec<String> = ours.keys().filter(|name| !nodes.contains_key(*name)).cloned().collect();
    assert_eq!(added, OURS);
    ours.retain(|name, _| nodes.contains_key(name));
    for (name, definition) in &nodes {
        assert_eq!(ours.get(name), Some(definition), "{name}");
    }
}

#[tokio::test]
async fn taking_over_or_moving_up_ends_with_the_catalog_of_a_fresh_installation() {
    let fresh = catalog(&Db::ours().await).await;
    for package in [
        "graphile-worker",
        "graphile-worker-0.17",
        "graphile-worker-0.16",
        "graphile-worker-0.15",
        "graphile-worker-0.14",
        "graphile-worker-0.13",
    ] {
        let db = Db::nodes(package).await;
        graphile_worker::migrate(&db.pool, "graphile_worker").await.expect("a migration");
        assert_eq!(catalog(&db).await, fresh, "{package}");
    }
}

#[tokio::test]
async fn node_finds_nothing_to_do_on_our_schema_and_leaves_our_functions_alone() {
    let db = Db::ours().await;
    let state = "select json_build_array(
        (select json_agg(json_build_array(proname, oid, xmin) order by oid) from pg_proc where pronamespace = 'graphile_worker'::regnamespace),
        (select json_agg(json_build_array(relname, oid, xmin) order by oid) from pg_class where relnamespace = 'graphile_worker'::regnamespace),
        (select json_agg(m order by id) from graphile_worker.migrations m))";
    let before = db.value(state).await;
    for package in ["graphile-worker", "graphile-worker-0.17"] {
        db.node_migrates(package);
        assert_eq!(db.value(state).await, before, "{package}");
    }
    let again = graphile_worker::migrate(&db.pool, "graphile_worker").await.expect("a migration");
    assert!(!again.changed);
}

#[tokio::test]
async fn functions_that_node_replaces_when_it_completes_the_ledger_are_restored() {
    let db = Db::ours().await;
    let ours = db.value(CATALOG).await;
    // As if we had taken over a database of level 19 and Node's 20 came after us.
    db.run("delete from graphile_worker.migrations where id = 20").await;
    db.node_migrates("graphile-worker");
    assert_eq!(
        db.value("select proconfig is null from pg_proc where proname = 'add_job'").await,
        json!(true),
        "Node's own"
    );
    let migration = graphile_worker::migrate(&db.pool, "graphile_worker").await.expect("a migration");
    assert!(migration.changed);
    assert_eq!(
        db.value("select proconfig is null from pg_proc where proname = 'add_job'").await,
        json!(false),
        "ours again"
    );
    assert_eq!(db.value(CATALOG).await, ours);
}
