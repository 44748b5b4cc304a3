-- Pauses $1 until $2, or without end if that is null. Locks the row of the limit; see `_rs_pause`.
select from :"schema"._rs_pause($1::text, coalesce($2::timestamptz, 'infinity'));
