-- The tables and the type that Node's worker and ours share. Constraints and indexes have the names from Node's own
-- migrations, so that a later migration of Node's finds what it expects.

create table :"schema"._private_tasks (
  id int generated always as identity constraint tasks_pkey primary key,
  identifier text not null
    constraint tasks_identifier_key unique
    constraint tasks_identifier_check check (length(identifier) <= 128)
);

create table :"schema"._private_job_queues (
  id int generated always as identity constraint job_queues_pkey1 primary key,
  queue_name text not null
    constraint job_queues_queue_name_key unique
    constraint job_queues_queue_name_check check (length(queue_name) <= 128),
  locked_at timestamptz,
  locked_by text,
  is_available boolean not null generated always as (locked_at is null) stored
);

create table :"schema"._private_jobs (
  id bigint generated always as identity constraint jobs_pkey1 primary key,
  job_queue_id int,
  task_id int not null,
  payload json not null default '{}',
  priority smallint not null default 0,
  run_at timestamptz not null default now(),
  attempts smallint not null default 0,
  max_attempts smallint not null default 25
    constraint jobs_max_attempts_check check (max_attempts >= 1),
  last_error text,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  key text
    constraint jobs_key_key1 unique
    constraint jobs_key_check check (length(key) > 0 and length(key) <= 512),
  locked_at timestamptz,
  locked_by text,
  revision int not null default 0,
  flags jsonb,
  is_available boolean not null generated always as (locked_at is null and attempts < max_attempts) stored
);

create index jobs_main_index on :"schema"._private_jobs
  (priority, run_at) include (id, task_id, job_queue_id)
  where is_available = true;

create index jobs_no_queue_index on :"schema"._private_jobs
  (priority, run_at) include (id, task_id)
  where is_available = true and job_queue_id is null;

create table :"schema"._private_known_crontabs (
  identifier text constraint known_crontabs_pkey primary key,
  known_since timestamptz not null,
  last_execution timestamptz
);

-- No policies: only the owner, and roles that bypass row security, can read or change rows.
alter table :"schema"._private_tasks enable row level security;
alter table :"schema"._private_job_queues enable row level security;
alter table :"schema"._private_jobs enable row level security;
alter table :"schema"._private_known_crontabs enable row level security;

-- An element of the array that `add_jobs` takes.
create type :"schema".job_spec as (
  identifier text,
  payload json,
  queue_name text,
  run_at timestamptz,
  max_attempts smallint,
  job_key text,
  priority smallint,
  flags text[]
);
