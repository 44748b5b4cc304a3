-- Notes in our ledger that step $1 was taken, and with which checksum ($2) it left the functions, if it did; $3 says whether
-- older workers must not work with what it has made.
insert into :"schema"._rs_additions (id, checksum, breaking) values ($1, $2, $3)
on conflict (id) do update
set checksum = excluded.checksum, breaking = excluded.breaking, ts = now(), wanted_until = null;
