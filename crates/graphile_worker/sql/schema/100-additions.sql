-- Our own ledger: what this implementation adds to the contract, with its own numbers, so that Node's ids stay
-- Node's. All names that are only ours begin with `_rs_`: a later Node release may create any `_private_…` without a
-- conflict.
--
-- Readable by all: every role that can use the schema may check whether it is up to date.
--
-- `checksum` is that of the SQL functions as a step installed them (queries/functions_checksum.sql). With it we
-- notice that another program has replaced them.
--
-- `wanted_until` marks a breaking step that is not applied yet: a newer release is about to apply it, at `ts` at the
-- latest, and waits for older workers to finish. Until then, an older release does not start. A negative id is a
-- migration of Node's ledger that a newer release is about to apply.
create table :"schema"._rs_additions (
  id int primary key,
  ts timestamptz not null default now(),
  breaking boolean not null default false,
  checksum text,
  wanted_until timestamptz
);
grant select on :"schema"._rs_additions to public;
