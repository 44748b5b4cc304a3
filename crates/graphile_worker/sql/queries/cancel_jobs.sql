-- Cancels the jobs $1 for the reason $2, by force if $3. Returns what became of each.
select cancelled.job_id, cancelled.outcome, cancelled.worker_id from :"schema"._rs_cancel_jobs($1, $2, $3) as cancelled;
