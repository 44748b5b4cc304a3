-- Limits: how many jobs of a task, a queue or a group may run at the same time in all workers, and how many may start in a
-- period. Pauses are limits, too: nothing starts while `paused_until` is in the future.
--
-- A job under a limit is in a lane: its `job_queue_id` is the id of the lane, which is negative and belongs to no row of
-- `_private_job_queues`. Node's worker claims only jobs without a queue, or of a queue that has a row. So it never runs a
-- job under a limit. Jobs without a limit are not touched, and cost nothing more.
--
-- A task with a limit has one lane, for its jobs without a queue. A queue with a limit, or with a job of a task that has
-- one, has a lane instead of a row. A queue's lane without a limit of its own is serial, as every named queue is.

-- `name` is 'task:…', 'queue:…', 'queue:…*', 'group:…' or 'all'. `prefix` is what the queues of a pattern begin with. `tat`
-- is the state of the rate: the time at which the next start would be due if all starts had been evenly spaced. For queues, it
-- is in the lane.
create table if not exists :"schema"._rs_limits (
  id int generated always as identity primary key,
  name text not null unique,
  task_id int,
  prefix text,
  concurrency int check (concurrency >= 1),
  rate int check (rate >= 1),
  per interval check (per > '0'),
  burst int not null default 1 check (burst >= 1),
  weight float8 not null default 1 check (weight > 0),
  cost int not null default 1 check (cost >= 1),
  group_id int,
  paused_at timestamptz,
  paused_until timestamptz,
  paused_by text,
  is_dropped boolean not null default false,
  tat timestamptz
) with (fillfactor = 50);
create unique index if not exists _rs_limits_of_tasks on :"schema"._rs_limits (task_id) where task_id is not null;

-- `turn` orders the lanes that wait: it grows with the time that the jobs of the lane take, divided by its weight. `ready_at` is
-- when a claim has to look at the lane: '-infinity' if it has due jobs and room, 'infinity' if only an event can change
-- something (a call, or room in the limit `waits_for`). `idle_since` is when a claim found last that only an event can change
-- something; null if there is more to do. `old_queue_id` is the queue that the lane replaces, as long as
-- that has jobs.
create table if not exists :"schema"._rs_lanes (
  id int generated always as identity (increment by -1 start with -1 minvalue -2147483648 maxvalue -1) primary key,
  queue_name text,
  task_id int,
  limit_id int,
  old_queue_id int,
  turn float8 not null default 0,
  mean_ms float8 not null default 1,
  tat timestamptz,
  ready_at timestamptz not null default 'infinity',
  waits_for int,
  idle_since timestamptz default now()
) with (fillfactor = 50);
create unique index if not exists _rs_lanes_of_queues on :"schema"._rs_lanes (queue_name) where queue_name is not null;
create unique index if not exists _rs_lanes_of_tasks on :"schema"._rs_lanes (task_id) where task_id is not null;
create index if not exists _rs_lanes_open on :"schema"._rs_lanes (turn) where ready_at operator(pg_catalog.=) '-infinity';
create index if not exists _rs_lanes_due on :"schema"._rs_lanes (ready_at)
  where ready_at operator(pg_catalog.>) '-infinity' and ready_at operator(pg_catalog.<) 'infinity';
create index if not exists _rs_lanes_waiting on :"schema"._rs_lanes (waits_for, turn) where waits_for is not null;
create index if not exists _rs_lanes_idle on :"schema"._rs_lanes (idle_since)
  where idle_since is not null and queue_name is not null;

-- A call says that something has changed in a lane: a job was added, or one has ended. A transaction only inserts calls,
-- so it waits for no other session; the next claim from the lane deletes them. A claim that does not see a call leaves it to the
-- next one, so no call is lost.
create table if not exists :"schema"._rs_lane_calls (
  id bigint generated always as identity primary key,
  lane_id int not null
);
create index if not exists _rs_lane_calls_by_lane on :"schema"._rs_lane_calls (lane_id);

alter table :"schema"._rs_limits enable row level security;
alter table :"schema"._rs_lanes enable row level security;
alter table :"schema"._rs_lane_calls enable row level security;

comment on index :"schema"._rs_limits_name_key is 'Finds a limit by its name.';
comment on index :"schema"._rs_limits_of_tasks is 'Finds the limit of a task.';
comment on index :"schema"._rs_lanes_of_queues is 'Finds the lane of a queue.';
comment on index :"schema"._rs_lanes_of_tasks is 'Finds the lane of a task.';
comment on index :"schema"._rs_lanes_open is 'For claims: lanes with due jobs and room, in the order of their turns.';
comment on index :"schema"._rs_lanes_due is 'For claims: lanes that have to be looked at later.';
comment on index :"schema"._rs_lanes_waiting is 'For claims: lanes that wait for room in a shared limit.';
comment on index :"schema"._rs_lanes_idle is 'Lanes of queues that may have had no jobs for long, the oldest first.';
comment on index :"schema"._rs_lane_calls_by_lane is 'For claims: lanes in which something has changed.';
