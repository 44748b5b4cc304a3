-- Node's ids up to the level of this contract. Inserts and does not update: on a ledger that a DBA created, the
-- installing role may only have that right.
insert into :"schema".migrations (id, breaking)
select id, id in (1, 3, 11, 13, 14, 16, 19)
from generate_series(1, 20) as contract (id)
where not exists (select from :"schema".migrations where migrations.id = contract.id)
order by id;
