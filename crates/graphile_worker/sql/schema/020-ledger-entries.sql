-- Node's ids up to the level of this contract. Inserts and does not update: the role that installs may
-- have no more rights than that on a ledger that a DBA made.
insert into :"schema".migrations (id, breaking)
select id, id in (1, 3, 11, 13, 14, 16, 19)
from generate_series(1, 20) as contract (id)
where not exists (select from :"schema".migrations where migrations.id = contract.id)
order by id;
