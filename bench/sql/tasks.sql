-- The tasks of all contestants.
insert into graphile_worker._private_tasks (identifier)
values ('trivial'), ('timed'), ('ordered'), ('limited'), ('recorded')
on conflict do nothing;
