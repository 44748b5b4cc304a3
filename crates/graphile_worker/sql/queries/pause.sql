-- Pauses $1 until $2, or without end if that is null. Locks the row of the limit; see `_rs_pause`.
select 1::pg_catalog.int8 as number
from :"schema"._rs_pause($1::pg_catalog.text, coalesce($2::pg_catalog.timestamptz, 'infinity'::pg_catalog.timestamptz));
