-- Our own ledger: the applied steps, and those that a newer release is waiting to apply.
select id, breaking, checksum, wanted_until is not null as is_wanted
from :"schema"._rs_additions
where wanted_until is null or wanted_until > now()
order by id;
