-- What a registered worker is, for people and for `why`: the machine and process, how many jobs it runs at the same time
-- (`slots`), and settings that can keep a job from running: `task_limits`, `forbidden_flags` (left out if a function decides),
-- `accepted_flags` (null if a function decides), `allowed_flags` (left out if all are), `sweep_threshold` and `poll_interval`
-- in seconds, `listens`, `pooled` (it connects through a pooler, where its connections have no name).
alter table :"schema"._rs_workers
  add column if not exists host text,
  add column if not exists pid int,
  add column if not exists slots int,
  add column if not exists settings jsonb;
