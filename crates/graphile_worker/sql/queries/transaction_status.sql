-- The outcome of transaction $1: 'in progress', 'committed' or 'aborted'; null if it is too old.
select txid_status($1::bigint);
