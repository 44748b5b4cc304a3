-- Moves waiting jobs into and out of lanes, as the limits require. Returns how much was done; 0 if nothing is left to do, -1 if
-- another session is doing it.
select coalesce(:"schema"._rs_settle_lanes(), (-1)::pg_catalog.int8) as number;
