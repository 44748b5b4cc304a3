-- Notes in our ledger that step $1 left the functions with checksum $2.
insert into :"schema"._rs_additions (id, checksum) values ($1, $2)
on conflict (id) do update set checksum = excluded.checksum, ts = now();
