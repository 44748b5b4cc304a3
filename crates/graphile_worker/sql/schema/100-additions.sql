-- Our own ledger: what this implementation adds to the contract, numbered on its own so that Node's
-- ids stay Node's. Everything that is only ours is named `_rs_…`: a later Node release may create any
-- `_private_…` it likes and will not stumble over us.
--
-- Readable by all: every role that can use the schema may ask whether it is up to date.
--
-- `checksum` is that of the SQL functions as a step left them (queries/functions_checksum.sql): how we
-- notice that another program has replaced them since.
--
-- `wanted_until` marks a breaking step that is not taken yet: a newer release wants to take it, at `ts` at the latest, and
-- waits for older workers to finish. Until then, and no longer, an older release does not start. A negative id is a
-- migration of Node's ledger that a newer release wants to apply.
create table :"schema"._rs_additions (
  id int primary key,
  ts timestamptz not null default now(),
  breaking boolean not null default false,
  checksum text,
  wanted_until timestamptz
);
grant select on :"schema"._rs_additions to public;
