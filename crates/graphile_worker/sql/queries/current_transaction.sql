-- The id of the current transaction, with which transaction_status.sql later finds its outcome.
select txid_current();
