-- The exchange of jobs under limits: reports those that have ended and claims others, in one statement. Both are functions,
-- because the claim needs snapshots that are taken after it has locked the lanes: see 117-limited-exchange-functions.sql.
--
--  $1 worker   $2 $3 completed jobs: ids, locked_at   $4 to $12 jobs given back, as $4 to $10, $16 and $19 of `exchange.sql`
--  $13 $14 lanes in which jobs have run, and how many milliseconds a job took on average   $15 ids of the tasks it runs
--  $16 how many jobs of each it may take, or null   $17 how many jobs it wants   $18 $19 $20 forbidden, accepted and allowed
--  flags, or null   $21 what time it is, or null for the database's   $22 how many seconds old its heartbeat may be, null if it has
--  none   $23 how many bytes of payloads it may take, about   $24 $25 $26 how many slots of each lane it keeps, and for how many
--  milliseconds the longest-running job there has run   $27 how many slots of a lane it can use   $28 for how many
--  milliseconds the jobs that it claims ahead may keep the slots busy
--  $29 which of the jobs given back have failed   $30 for how many seconds each of them closes a limit, null if it was not rate
--  limited   $31 the name of that limit, or null   $32 $33 $34 jobs that their handlers have completed: lanes, tasks, locked_at
--
-- Returns the claimed jobs and one last row without an id, like `exchange.sql`. `seconds` is
-- how long the worker may wait with the next claim, if nothing happens before.
select
  claimed.*, report.blocked_jobs, report.rejected_jobs,
  extract(epoch from claimed.next_at - coalesce($21::timestamptz, now()))::float8 as seconds
from :"schema"._rs_report_of_lanes(
  $1::text, $2::bigint[], $3::timestamptz[], $4::bigint[], $5::timestamptz[], $6::text[], $7::float8[], $8::timestamptz[],
  $9::int[], $10::text[], $11::text[], $12::int[], $21::timestamptz, $29::boolean[], $30::float8[], $31::text[], $32::int[], $33::text[],
  $34::timestamptz[]
) as report
cross join lateral :"schema"._rs_claim_from_lanes(
  $1::text, report.ended_lanes, $13::int[], $14::float8[], $15::int[], $16::int[], $17::int, $18::text[], $19::text[],
  $20::jsonb, $21::timestamptz, $22::float8, $23::int, $24::int[], $25::int[], $26::float8[], $27::int, $28::float8
) as claimed;
