-- Drops the limit $1; false if there is none. Locks its row; see `_rs_drop_limit`.
select :"schema"._rs_drop_limit($1::text);
