-- Drops the limit $1; 0 if there is none. Locks its row; see `_rs_drop_limit`.
select (case when :"schema"._rs_drop_limit($1::pg_catalog.text) then 1 else 0 end)::pg_catalog.int8 as number;
