-- Blocks all other migrations until this transaction ends; the ledger can still be read.
lock table :"schema".migrations in share row exclusive mode;
