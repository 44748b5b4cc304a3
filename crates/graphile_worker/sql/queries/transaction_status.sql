-- What became of transaction $1: 'in progress', 'committed' or 'aborted'; null if it is too old to be known.
select txid_status($1::bigint);
