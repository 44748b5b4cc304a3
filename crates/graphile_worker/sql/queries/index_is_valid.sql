-- Whether the index $1 is whole: one that was being built beside running workers when that was broken off is there, and
-- of no use. No row where there is none.
select indisvalid from pg_index where indexrelid = to_regclass(format('%I.%I', :'schema', $1::text));
