-- Describes the indexes that only this worker has. Runs when all of them exist.
comment on index :"schema"._rs_jobs_unqueued is 'For claims: waiting jobs without a queue, in the order in which they run.';
comment on index :"schema"._rs_jobs_in_queues is 'For claims: waiting jobs with a queue, in the order in which they run.';
comment on index :"schema"._rs_jobs_by_queue is 'For claims: the waiting jobs of each queue.';
comment on index :"schema"._rs_jobs_by_kind is 'For claims behind many jobs that a worker cannot take: waiting jobs without a queue, by task, priority and flags.';
comment on index :"schema"._rs_jobs_in_queues_by_task is 'For claims with task limits: waiting jobs with a queue, by task.';
comment on index :"schema"._rs_jobs_in_use is 'For limits: the jobs in lanes that are claimed.';
comment on index :"schema"._rs_jobs_failed_in_lanes is 'For lanes without waiting jobs: the failed jobs in lanes.';
