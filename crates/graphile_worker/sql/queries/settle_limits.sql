-- Puts waiting jobs where the limits want them. Returns how much was done; 0 if nothing is left to do, -1 if another session is at it.
select coalesce(:"schema"._rs_settle_lanes(), (-1)::pg_catalog.int8) as number;
