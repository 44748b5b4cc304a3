-- Whether the index $1 is whole: one that was being built beside running workers when that was broken off is there, and
-- of no use. No row where there is none.
select indisvalid from pg_catalog.pg_index
where indexrelid operator(pg_catalog.=)
  pg_catalog.to_regclass(pg_catalog.format('%I.%I', :'schema', $1::pg_catalog.text))::pg_catalog.oid;
