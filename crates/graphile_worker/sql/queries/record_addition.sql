-- Notes in our ledger that step $1 was taken, and with which checksum ($2) it left the functions, if it did.
insert into :"schema"._rs_additions (id, checksum) values ($1, $2)
on conflict (id) do update set checksum = excluded.checksum, ts = now();
