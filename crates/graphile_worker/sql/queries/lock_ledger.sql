-- Lets nobody else migrate until this transaction ends; readers of the ledger go on.
lock table :"schema".migrations in share row exclusive mode;
