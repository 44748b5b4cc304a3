-- The migrations $1 of Node's ledger are applied: deletes the requests of `request_migration.sql`.
delete from :"schema"._rs_additions where id < 0 and -id = any ($1::int[]);
