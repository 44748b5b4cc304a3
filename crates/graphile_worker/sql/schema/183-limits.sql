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
-- is the state of the rate: the time at which the next start would be due if all starts had been evenly spaced. `started_at` is
-- when a job last took a token of it. No job starts before `closed_until`: a job was rate limited, or the breaker has tripped.
-- `trip` and `trip_for` are the settings of the breaker, `failures` is how many jobs have failed in a row, `tripped_at` is when it
-- tripped. Jobs that were claimed before `counted_from` no longer count. For queues, this state is in the lane.
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
  tat timestamptz,
  started_at timestamptz,
  trip int check (trip >= 1),
  trip_for interval check (trip_for > '0'),
  closed_until timestamptz,
  failures int not null default 0,
  tripped_at timestamptz,
  counted_from timestamptz
) with (fillfactor = 50);
create unique index if not exists _rs_limits_of_tasks on :"schema"._rs_limits (task_id) where task_id is not null;
create index if not exists _rs_limits_with_breakers on :"schema"._rs_limits (id) where trip is not null;

-- `turn` orders the lanes that wait: it grows with the time that the jobs of the lane take, divided by its weight. `ready_at` is
-- when a claim has to look at the lane: '-infinity' if it has due jobs and room, 'infinity' if only an event can change
-- something (a call, or room in the limit `waits_for`). `idle_since` is when a claim last found that only an event can change
-- something; null if there is more to do. `old_queue_id` is the queue that the lane replaces, as long as that has jobs. `is_new`
-- means that the transaction that created the lane may have overlapped one that set or dropped a limit, so that neither saw the
-- other: `limit_id` must be checked.
create table if not exists :"schema"._rs_lanes (
  id int generated always as identity (increment by -1 start with -1 minvalue -2147483648 maxvalue -1) primary key,
  queue_name text,
  task_id int,
  limit_id int,
  old_queue_id int,
  is_new boolean not null default false,
  turn float8 not null default 0,
  mean_ms float8 not null default 1,
  tat timestamptz,
  ready_at timestamptz not null default 'infinity',
  waits_for int,
  started_at timestamptz,
  closed_until timestamptz,
  failures int not null default 0,
  tripped_at timestamptz,
  counted_from timestamptz,
  idle_since timestamptz default now()
) with (fillfactor = 50);
create unique index if not exists _rs_lanes_of_queues on :"schema"._rs_lanes (queue_name) where queue_name is not null;
create unique index if not exists _rs_lanes_of_tasks on :"schema"._rs_lanes (task_id) where task_id is not null;
create index if not exists _rs_lanes_open on :"schema"._rs_lanes (turn) where ready_at operator(pg_catalog.=) '-infinity';
create index if not exists _rs_lanes_due on :"schema"._rs_lanes (ready_at)
  where ready_at operator(pg_catalog.>) '-infinity' and ready_at operator(pg_catalog.<) 'infinity';
create index if not exists _rs_lanes_new on :"schema"._rs_lanes (id) where is_new;
create index if not exists _rs_lanes_closed on :"schema"._rs_lanes (closed_until) where closed_until is not null;
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

-- How many slots a worker has in a lane, if it has claimed more jobs than slots. Without a row, each claimed job has a slot.
create table if not exists :"schema"._rs_slots (
  lane_id int not null,
  worker_id text not null,
  slots int not null,
  primary key (lane_id, worker_id)
) with (fillfactor = 50);

-- Outcomes of jobs that count for a breaker or a rate, until a session that has locked the lane or the limit applies them
-- (`_rs_apply_outcomes`). One row for each lane or limit and each time of a claim. Reports only insert, so none waits for another
-- session. `has_succeeded` overrides the failures of the same row. `tokens` go back to the rate.
create table if not exists :"schema"._rs_limit_outcomes (
  id bigint generated always as identity primary key,
  lane_id int,
  limit_id int,
  claimed_at timestamptz not null,
  has_succeeded boolean not null,
  failures int not null,
  tokens int not null,
  closed_until timestamptz
);
create index if not exists _rs_limit_outcomes_of_lanes on :"schema"._rs_limit_outcomes (lane_id) where lane_id is not null;
create index if not exists _rs_limit_outcomes_of_limits on :"schema"._rs_limit_outcomes (limit_id) where limit_id is not null;

alter table :"schema"._rs_limit_outcomes enable row level security;
alter table :"schema"._rs_limits enable row level security;
alter table :"schema"._rs_lanes enable row level security;
alter table :"schema"._rs_lane_calls enable row level security;
alter table :"schema"._rs_slots enable row level security;

comment on index :"schema"._rs_limits_name_key is 'Finds a limit by its name.';
comment on index :"schema"._rs_limits_of_tasks is 'Finds the limit of a task.';
comment on index :"schema"._rs_limits_with_breakers is 'For reports: whether outcomes count.';
comment on index :"schema"._rs_lanes_closed is 'For workers: queues that are closed for a while.';
comment on index :"schema"._rs_limit_outcomes_of_lanes is 'For claims: outcomes that count for a lane.';
comment on index :"schema"._rs_limit_outcomes_of_limits is 'For claims: outcomes that count for a limit.';
comment on index :"schema"._rs_lanes_of_queues is 'Finds the lane of a queue.';
comment on index :"schema"._rs_lanes_of_tasks is 'Finds the lane of a task.';
comment on index :"schema"._rs_lanes_open is 'For claims: lanes with due jobs and room, in the order of their turns.';
comment on index :"schema"._rs_lanes_due is 'For claims: lanes that have to be looked at later.';
comment on index :"schema"._rs_lanes_new is 'Finds the lanes whose limit has to be checked.';
comment on index :"schema"._rs_lanes_waiting is 'For claims: lanes that wait for room in a shared limit.';
comment on index :"schema"._rs_lanes_idle is 'Lanes of queues that may have had no jobs for a long time, the oldest first.';
comment on index :"schema"._rs_lane_calls_by_lane is 'For claims: lanes in which something has changed.';
