-- Our own ledger.
select id, breaking, checksum from :"schema"._rs_additions order by id;
