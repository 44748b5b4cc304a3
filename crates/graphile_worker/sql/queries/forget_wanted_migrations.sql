-- The migrations $1 of Node's ledger are applied: what `want_migration.sql` has noted of them is void.
delete from :"schema"._rs_additions where id < 0 and -id = any ($1::int[]);
