-- Records in our ledger that step $1 was applied, and the checksum of the functions ($2) if it installed them; $3
-- says whether it is breaking.
insert into :"schema"._rs_additions (id, checksum, breaking) values ($1, $2, $3)
on conflict (id) do update
set checksum = excluded.checksum, breaking = excluded.breaking, ts = pg_catalog.now(), wanted_until = null;
