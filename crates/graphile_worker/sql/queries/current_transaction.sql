-- The id of the current transaction, by which transaction_status.sql tells later what became of it.
select txid_current();
