//! The SQL files, with the schema's name put in, and the rows they return. The only file that knows how a name is
//! quoted and what a row looks like.
//!
//! Files use psql's own notation, `:"schema"` for the identifier and `:'schema'` for the text, so that
//! `psql -1 -v schema=graphile_worker -f FILE` can run, prepare or explain them as they stand.

use crate::Error;
use crate::job::Job;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgRow, PgTypeInfo, PgValueFormat, PgValueRef};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Postgres, Row};
use std::collections::HashMap;
use std::sync::Arc;

/// PostgreSQL cuts longer names off; two schemas could then be one.
const LONGEST_NAME: usize = 63;

/// A legal name of a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schema(String);

impl Schema {
    pub(crate) fn new(name: &str) -> Result<Schema, Error> {
        let problem = if name.is_empty() {
            "is empty"
        } else if name.len() > LONGEST_NAME {
            "is longer than the 63 bytes that PostgreSQL keeps of a name"
        } else if name.contains('\0') {
            "contains a NUL character"
        } else if name == "$user" {
            "is what PostgreSQL's search_path takes for the name of the current role"
        } else {
            return Ok(Schema(name.to_owned()));
        };
        Err(Error::InvalidSchemaName { name: name.to_owned(), problem })
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// The text of an SQL file for this schema, where an index is made at once.
    pub(crate) fn sql(&self, file: &'static str) -> AssertSqlSafe<String> {
        self.text(file, "")
    }

    /// The text of an SQL file for this schema, where an index is made beside those who use the table.
    pub(crate) fn sql_concurrently(&self, file: &'static str) -> AssertSqlSafe<String> {
        self.text(file, "concurrently")
    }

    fn text(&self, file: &'static str, concurrently: &str) -> AssertSqlSafe<String> {
        let identifier = quote_identifier(&self.0);
        let text = if self.0.contains('\\') {
            format!(" E'{}'", self.0.replace('\\', "\\\\").replace('\'', "''"))
        } else {
            format!("'{}'", self.0.replace('\'', "''"))
        };
        // All marks are replaced in one pass, so that a name which looks like a mark stays a name.
        let marks = [(":\"schema\"", &*identifier), (":'schema'", &*text), (":concurrently", concurrently)];
        let mut sql = String::with_capacity(file.len() + 1024);
        let mut rest = file;
        while let Some((at, mark, value)) =
            marks.iter().filter_map(|(mark, value)| Some((rest.find(mark)?, *mark, *value))).min()
        {
            sql.push_str(&rest[..at]);
            sql.push_str(value);
            rest = &rest[at + mark.len()..];
        }
        sql.push_str(rest);
        AssertSqlSafe(sql)
    }
}

pub(crate) fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The statements of `migrate`, one a file.
pub(crate) mod queries {
    pub(crate) const INSTALLATION: &str = include_str!("../sql/queries/installation.sql");
    pub(crate) const LOCK_LEDGER: &str = include_str!("../sql/queries/lock_ledger.sql");
    pub(crate) const LEDGER: &str = include_str!("../sql/queries/ledger.sql");
    pub(crate) const ADDITIONS: &str = include_str!("../sql/queries/additions.sql");
    pub(crate) const FUNCTIONS_CHECKSUM: &str = include_str!("../sql/queries/functions_checksum.sql");
    pub(crate) const RECORD_ADDITION: &str = include_str!("../sql/queries/record_addition.sql");
    pub(crate) const COUNT_JOBS: &str = include_str!("../sql/queries/count_jobs.sql");
    pub(crate) const CONTRACT_DIFFERENCES: &str = include_str!("../sql/queries/contract_differences.sql");
    pub(crate) const INDEX_IS_VALID: &str = include_str!("../sql/queries/index_is_valid.sql");
    pub(crate) const ANNOUNCE_MIGRATION: &str = include_str!("../sql/queries/announce_migration.sql");
    pub(crate) const WANT_ADDITION: &str = include_str!("../sql/queries/want_addition.sql");
    pub(crate) const WANT_MIGRATION: &str = include_str!("../sql/queries/want_migration.sql");
    pub(crate) const FORGET_WANTED_MIGRATIONS: &str = include_str!("../sql/queries/forget_wanted_migrations.sql");
    pub(crate) const LOCK_HOLDERS: &str = include_str!("../sql/queries/lock_holders.sql");
    pub(crate) const LIVE_WORKERS: &str = include_str!("../sql/queries/live_workers.sql");
    pub(crate) const OLD_LAYOUT_LOCKS: &str = include_str!("../sql/queries/old_layout_locks.sql");
}

/// The statements of a worker and of its utilities, ready for one schema.
pub(crate) struct Statements {
    pub(crate) schema: Schema,
    pub(crate) exchange: Statement,
    pub(crate) current_transaction: Statement,
    pub(crate) transaction_status: Statement,
    pub(crate) held: Statement,
    pub(crate) next_run_at: Statement,
    pub(crate) terminate_earlier_connections: Statement,
    pub(crate) newer_steps: Statement,
    pub(crate) ensure_tasks: Statement,
    pub(crate) task_ids: Statement,
    pub(crate) complete_in_transaction: Statement,
    pub(crate) clear_stale_locks: Statement,
    pub(crate) keep_locks_fresh: Statement,
    pub(crate) add_job: Statement,
    pub(crate) add_jobs: Statement,
    pub(crate) add_merged_jobs: Statement,
    pub(crate) add_piece: Statement,
    pub(crate) job_names: Statement,
    pub(crate) is_same_transaction: Statement,
    pub(crate) notify_jobs: Statement,
    pub(crate) remove_job: Statement,
    pub(crate) complete_jobs: Statement,
    pub(crate) permanently_fail_jobs: Statement,
    pub(crate) reschedule_jobs: Statement,
    pub(crate) force_unlock_workers: Statement,
    pub(crate) delete_unused_names: Statement,
    pub(crate) delete_failed_jobs: Statement,
    pub(crate) queue_name: Statement,
    pub(crate) cron_time: Statement,
    pub(crate) cron_known: Statement,
    pub(crate) cron_ticks: Statement,
    pub(crate) cron_items: Statement,
    pub(crate) recovery_lock: Statement,
    pub(crate) recovery_dead_workers: Statement,
    pub(crate) recovery_jobs: Statement,
    pub(crate) recovery_recover: Statement,
    pub(crate) recovery_forget: Statement,
    pub(crate) recovery_swept: Statement,
    pub(crate) recovery_register: Statement,
    pub(crate) recovery_heartbeat: Statement,
    pub(crate) recovery_leave: Statement,
    pub(crate) recovery_workers: Statement,
    pub(crate) list_jobs: Statement,
    pub(crate) find_job: Statement,
    pub(crate) stats: Statement,
    pub(crate) list_queues: Statement,
    pub(crate) list_workers: Statement,
    pub(crate) why: Statement,
    pub(crate) checkup_server: Statement,
    pub(crate) checkup_schema: Statement,
    pub(crate) checkup_tables: Statement,
    pub(crate) checkup_jobs: Statement,
    pub(crate) job_counters: Statement,
    pub(crate) uninstall_look: Statement,
    pub(crate) uninstall_jobs: Statement,
    pub(crate) uninstall: Statement,
}

/// The text of a statement; cheap to clone, as the driver wants it owned.
#[derive(Clone)]
pub(crate) struct Statement(Arc<str>);

impl Statement {
    #[cfg(feature = "tokio-postgres")]
    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    pub(crate) fn sql(&self) -> AssertSqlSafe<Arc<str>> {
        AssertSqlSafe(self.0.clone())
    }
}

impl Statements {
    pub(crate) fn new(schema: Schema) -> Statements {
        let statement = |file: &'static str| Statement(schema.sql(file).0.into());
        Statements {
            exchange: statement(include_str!("../sql/queries/exchange.sql")),
            current_transaction: statement(include_str!("../sql/queries/current_transaction.sql")),
            transaction_status: statement(include_str!("../sql/queries/transaction_status.sql")),
            held: statement(include_str!("../sql/queries/held.sql")),
            terminate_earlier_connections: statement(include_str!("../sql/queries/terminate_earlier_connections.sql")),
            next_run_at: statement(include_str!("../sql/queries/next_run_at.sql")),
            newer_steps: statement(include_str!("../sql/queries/newer_steps.sql")),
            ensure_tasks: statement(include_str!("../sql/queries/ensure_tasks.sql")),
            task_ids: statement(include_str!("../sql/queries/task_ids.sql")),
            complete_in_transaction: statement(include_str!("../sql/queries/complete_in_transaction.sql")),
            keep_locks_fresh: statement(include_str!("../sql/queries/keep_locks_fresh.sql")),
            clear_stale_locks: statement(include_str!("../sql/queries/clear_stale_locks.sql")),
            add_job: statement(include_str!("../sql/queries/add_job.sql")),
            add_jobs: statement(include_str!("../sql/queries/add_jobs.sql")),
            add_merged_jobs: statement(include_str!("../sql/queries/add_merged_jobs.sql")),
            add_piece: statement(include_str!("../sql/queries/add_piece.sql")),
            job_names: statement(include_str!("../sql/queries/job_names.sql")),
            is_same_transaction: statement(include_str!("../sql/queries/is_same_transaction.sql")),
            notify_jobs: statement(include_str!("../sql/queries/notify_jobs.sql")),
            remove_job: statement(include_str!("../sql/queries/remove_job.sql")),
            complete_jobs: statement(include_str!("../sql/queries/complete_jobs.sql")),
            permanently_fail_jobs: statement(include_str!("../sql/queries/permanently_fail_jobs.sql")),
            reschedule_jobs: statement(include_str!("../sql/queries/reschedule_jobs.sql")),
            force_unlock_workers: statement(include_str!("../sql/queries/force_unlock_workers.sql")),
            delete_unused_names: statement(include_str!("../sql/queries/delete_unused_names.sql")),
            delete_failed_jobs: statement(include_str!("../sql/queries/delete_failed_jobs.sql")),
            queue_name: statement(include_str!("../sql/queries/queue_name.sql")),
            cron_time: statement(include_str!("../sql/queries/cron_time.sql")),
            cron_known: statement(include_str!("../sql/queries/cron_known.sql")),
            cron_ticks: statement(include_str!("../sql/queries/cron_ticks.sql")),
            cron_items: statement(include_str!("../sql/queries/cron_items.sql")),
            recovery_lock: statement(include_str!("../sql/queries/recovery_lock.sql")),
            recovery_dead_workers: statement(include_str!("../sql/queries/recovery_dead_workers.sql")),
            recovery_jobs: statement(include_str!("../sql/queries/recovery_jobs.sql")),
            recovery_recover: statement(include_str!("../sql/queries/recovery_recover.sql")),
            recovery_forget: statement(include_str!("../sql/queries/recovery_forget.sql")),
            recovery_swept: statement(include_str!("../sql/queries/recovery_swept.sql")),
            recovery_register: statement(include_str!("../sql/queries/recovery_register.sql")),
            recovery_heartbeat: statement(include_str!("../sql/queries/recovery_heartbeat.sql")),
            recovery_leave: statement(include_str!("../sql/queries/recovery_leave.sql")),
            recovery_workers: statement(include_str!("../sql/queries/recovery_workers.sql")),
            list_jobs: statement(include_str!("../sql/queries/list_jobs.sql")),
            find_job: statement(include_str!("../sql/queries/find_job.sql")),
            stats: statement(include_str!("../sql/queries/stats.sql")),
            list_queues: statement(include_str!("../sql/queries/list_queues.sql")),
            list_workers: statement(include_str!("../sql/queries/list_workers.sql")),
            why: statement(include_str!("../sql/queries/why.sql")),
            checkup_server: statement(include_str!("../sql/queries/checkup_server.sql")),
            checkup_schema: statement(include_str!("../sql/queries/checkup_schema.sql")),
            checkup_tables: statement(include_str!("../sql/queries/checkup_tables.sql")),
            checkup_jobs: statement(include_str!("../sql/queries/checkup_jobs.sql")),
            job_counters: statement(include_str!("../sql/queries/job_counters.sql")),
            uninstall_look: statement(include_str!("../sql/queries/uninstall_look.sql")),
            uninstall_jobs: statement(include_str!("../sql/queries/uninstall_jobs.sql")),
            uninstall: statement(include_str!("../sql/queries/uninstall.sql")),
            schema,
        }
    }
}

/// A value for a statement, of one of the types that ours take.
pub(crate) enum Parameter {
    Text(Option<String>),
    Time(Option<DateTime<Utc>>),
    Int(Option<i32>),
    Bool(bool),
    Ids(Vec<i64>),
    Ints(Vec<Option<i32>>),
    TextArray(Option<Vec<String>>),
    Texts(Vec<Option<String>>),
    Times(Vec<Option<DateTime<Utc>>>),
    Shorts(Vec<Option<i16>>),
}

/// A statement with its values.
pub(crate) fn bound(statement: &Statement, parameters: Vec<Parameter>) -> Query<'static, Postgres, PgArguments> {
    parameters.into_iter().fold(sqlx::query(statement.sql()), |query, parameter| match parameter {
        Parameter::Text(value) => query.bind(value),
        Parameter::Time(value) => query.bind(value),
        Parameter::Int(value) => query.bind(value),
        Parameter::Bool(value) => query.bind(value),
        Parameter::Ids(value) => query.bind(value),
        Parameter::Ints(value) => query.bind(value),
        Parameter::TextArray(value) => query.bind(value),
        Parameter::Texts(value) => query.bind(value),
        Parameter::Times(value) => query.bind(value),
        Parameter::Shorts(value) => query.bind(value),
    })
}

/// A `timestamptz`. PostgreSQL holds times that chrono and JSON do not (±infinity, 4713 BC, the year 200000); the drivers'
/// own decoders panic or fail on them, for the whole result. Here they become the first or the last day of the years 1 to
/// 9999, so one odd row costs nothing but its own precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Time(pub(crate) DateTime<Utc>);

impl Time {
    /// From PostgreSQL's binary format: microseconds since 2000; the smallest and the largest mean ±infinity.
    fn from_binary(micros: i64) -> Time {
        const YEAR_2000: i64 = 946_684_800_000_000;
        const FIRST: i64 = -62_135_596_800_000_000; // 0001-01-01
        const LAST: i64 = 253_402_214_400_000_000; // 9999-12-31
        let micros = micros.saturating_add(YEAR_2000).clamp(FIRST, LAST);
        Time(DateTime::from_timestamp_micros(micros).unwrap_or_default())
    }
}

impl sqlx::Type<Postgres> for Time {
    fn type_info() -> PgTypeInfo {
        <DateTime<Utc> as sqlx::Type<Postgres>>::type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Time {
    fn decode(value: PgValueRef<'r>) -> Result<Time, BoxDynError> {
        match value.format() {
            PgValueFormat::Binary => Ok(Time::from_binary(i64::from_be_bytes(value.as_bytes()?.try_into()?))),
            PgValueFormat::Text => sqlx::Decode::<Postgres>::decode(value).map(Time),
        }
    }
}

#[cfg(feature = "tokio-postgres")]
impl<'a> tokio_postgres::types::FromSql<'a> for Time {
    fn from_sql(_: &tokio_postgres::types::Type, raw: &'a [u8]) -> Result<Time, BoxDynError> {
        Ok(Time::from_binary(i64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(of: &tokio_postgres::types::Type) -> bool {
        *of == tokio_postgres::types::Type::TIMESTAMPTZ
    }
}

/// The time in a column.
pub(crate) fn time(row: &PgRow, column: &str) -> sqlx::Result<DateTime<Utc>> {
    row.try_get(column).map(|Time(time)| time)
}

/// The time in a column that may be null.
pub(crate) fn optional_time(row: &PgRow, column: &str) -> sqlx::Result<Option<DateTime<Utc>>> {
    row.try_get(column).map(|time: Option<Time>| time.map(|Time(time)| time))
}

/// The flags of a job, a `jsonb`. Reading never fails: a number that does not fit into an `f64` becomes a string of its
/// digits, and so does anything that is nested too deep.
#[derive(Debug, PartialEq)]
pub(crate) struct Flags(pub(crate) serde_json::Value);

impl Flags {
    /// From PostgreSQL's binary format: a version number, then the text.
    fn from_binary(bytes: &[u8]) -> Result<Flags, BoxDynError> {
        match bytes {
            [1, text @ ..] => Ok(Flags(lenient(std::str::from_utf8(text)?, 0))),
            _ => Err("jsonb of an unknown version".into()),
        }
    }
}

fn lenient(text: &str, depth: usize) -> serde_json::Value {
    use serde_json::Value;
    /// As deep as serde_json itself goes.
    const DEEPEST: usize = 127;
    let as_it_is = || Value::String(text.to_owned());
    if let Ok(value) = serde_json::from_str(text) {
        return value;
    }
    if depth > DEEPEST {
        return as_it_is();
    }
    let deeper = |value: &RawValue| lenient(value.get(), depth + 1);
    if let Ok(object) = serde_json::from_str::<HashMap<String, &RawValue>>(text) {
        return Value::Object(object.into_iter().map(|(key, value)| (key, deeper(value))).collect());
    }
    match serde_json::from_str::<Vec<&RawValue>>(text) {
        Ok(array) => Value::Array(array.into_iter().map(deeper).collect()),
        Err(_) => as_it_is(),
    }
}

impl sqlx::Type<Postgres> for Flags {
    fn type_info() -> PgTypeInfo {
        <serde_json::Value as sqlx::Type<Postgres>>::type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Flags {
    fn decode(value: PgValueRef<'r>) -> Result<Flags, BoxDynError> {
        match value.format() {
            PgValueFormat::Binary => Flags::from_binary(value.as_bytes()?),
            PgValueFormat::Text => Ok(Flags(lenient(value.as_str()?, 0))),
        }
    }
}

#[cfg(feature = "tokio-postgres")]
impl<'a> tokio_postgres::types::FromSql<'a> for Flags {
    fn from_sql(_: &tokio_postgres::types::Type, raw: &'a [u8]) -> Result<Flags, BoxDynError> {
        Flags::from_binary(raw)
    }

    fn accepts(of: &tokio_postgres::types::Type) -> bool {
        *of == tokio_postgres::types::Type::JSONB
    }
}

/// Builds a [`Job`] from a row of either driver. `$json` turns a parser's error into the driver's.
///
/// Whatever a row holds can be read: numbers and texts are what their columns allow, [`Time`] and [`Flags`] never fail, and
/// every text that PostgreSQL takes for JSON is JSON to `RawValue`. An error means that the columns are not those of the
/// contract.
macro_rules! job_from_row {
    ($row:expr, $identifier:expr, $json:expr) => {{
        let payload: String = $row.try_get("payload")?;
        let run_at: $crate::db::Time = $row.try_get("run_at")?;
        let created_at: $crate::db::Time = $row.try_get("created_at")?;
        let updated_at: $crate::db::Time = $row.try_get("updated_at")?;
        let locked_at: Option<$crate::db::Time> = $row.try_get("locked_at")?;
        let flags: Option<$crate::db::Flags> = $row.try_get("flags")?;
        Ok(Job {
            id: $row.try_get("id")?,
            task_identifier: match $identifier {
                Some(identifier) => identifier,
                None => {
                    let identifier: String = $row.try_get("task_identifier")?;
                    identifier.into()
                }
            },
            payload: RawValue::from_string(payload).map_err($json)?,
            job_queue_id: $row.try_get("job_queue_id")?,
            priority: $row.try_get("priority")?,
            run_at: run_at.0,
            attempts: $row.try_get("attempts")?,
            max_attempts: $row.try_get("max_attempts")?,
            last_error: $row.try_get("last_error")?,
            created_at: created_at.0,
            updated_at: updated_at.0,
            key: $row.try_get("key")?,
            locked_at: locked_at.map(|time| time.0),
            revision: $row.try_get("revision")?,
            flags: flags.map(|flags| flags.0),
        })
    }};
}

#[cfg(feature = "tokio-postgres")]
pub(crate) use job_from_row;

/// A job from a row whose task is known by other means, or named in the row.
pub(crate) fn job(row: &PgRow, task_identifier: Option<Arc<str>>) -> sqlx::Result<Job> {
    job_from_row!(row, task_identifier, |error| sqlx::Error::Decode(error.into()))
}

/// What gets installed, in the order of the numbers; `migrate` decides which of them.
pub(crate) mod schema {
    pub(crate) const SCHEMA: &str = include_str!("../sql/schema/001-schema.sql");
    pub(crate) const LEDGER: &str = include_str!("../sql/schema/002-ledger.sql");
    pub(crate) const LEDGER_BREAKING_COLUMN: &str = include_str!("../sql/schema/003-ledger-breaking-column.sql");
    pub(crate) const TABLES: &str = include_str!("../sql/schema/010-tables.sql");
    pub(crate) const VIEW: &str = include_str!("../sql/schema/011-view.sql");
    pub(crate) const LEFTOVERS: &str = include_str!("../sql/schema/012-leftovers.sql");
    pub(crate) const LEDGER_ENTRIES: &str = include_str!("../sql/schema/020-ledger-entries.sql");
    pub(crate) const LEDGER_FLAGS: &str = include_str!("../sql/schema/021-ledger-flags.sql");
    pub(crate) const ADDITIONS: &str = include_str!("../sql/schema/100-additions.sql");
    pub(crate) const FUNCTIONS: &str = include_str!("../sql/schema/110-functions.sql");
    pub(crate) const RECOVERY_FUNCTIONS: &str = include_str!("../sql/schema/111-recovery-functions.sql");
    /// By name.
    pub(crate) const INDEXES: [(&str, &str); 3] = [
        ("_rs_jobs_unqueued", include_str!("../sql/schema/120-index-unqueued.sql")),
        ("_rs_jobs_queued", include_str!("../sql/schema/121-index-queued.sql")),
        ("_rs_jobs_by_queue", include_str!("../sql/schema/122-index-by-queue.sql")),
    ];
    pub(crate) const TABLE_CARE: &str = include_str!("../sql/schema/130-table-care.sql");
    pub(crate) const CRONTAB_ITEMS: &str = include_str!("../sql/schema/140-crontab-items.sql");
    pub(crate) const WORKERS: &str = include_str!("../sql/schema/150-workers.sql");
    pub(crate) const USED_NAMES: &str = include_str!("../sql/schema/160-used-names.sql");
    #[cfg(feature = "_next_release")]
    pub(crate) const NEXT_RELEASE: &str = include_str!("../tests/it/next_release/step.sql");
    pub(crate) const OLD_LAYOUT_SET_ASIDE: &str = include_str!("../sql/schema/900-old-layout-set-aside.sql");
    pub(crate) const OLD_LAYOUT_BY_NAME: &str = include_str!("../sql/schema/901-old-layout-by-name.sql");
    pub(crate) const OLD_LAYOUT_BY_ID: &str = include_str!("../sql/schema/902-old-layout-by-id.sql");
    pub(crate) const OLD_LAYOUT_BRING_IN: &str = include_str!("../sql/schema/910-old-layout-bring-in.sql");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sql(schema: &str, file: &'static str) -> String {
        Schema::new(schema).expect("a legal name").sql(file).0
    }

    #[test]
    fn a_schema_name_is_quoted_wherever_it_stands() {
        assert_eq!(sql("plain", r#"from :"schema".jobs"#), r#"from "plain".jobs"#);
        assert_eq!(sql(r#"it's "mine""#, r#":"schema" :'schema'"#), r#""it's ""mine""" 'it''s "mine"'"#);
        assert_eq!(sql(r"back\slash", r#":"schema" :'schema'"#), r#""back\slash"  E'back\\slash'"#);
    }

    #[test]
    fn a_schema_name_that_looks_like_a_placeholder_is_left_alone() {
        assert_eq!(sql(":'schema'", r#"a :"schema" b"#), r#"a ":'schema'" b"#);
    }

    #[test]
    fn times_that_chrono_or_json_cannot_hold_are_clamped() {
        let time = |micros| Time::from_binary(micros).0.to_rfc3339();
        assert_eq!(time(0), "2000-01-01T00:00:00+00:00");
        assert_eq!(time(-1), "1999-12-31T23:59:59.999999+00:00");
        for (micros, clamped) in [(i64::MAX, "9999-12-31T00:00:00+00:00"), (i64::MIN, "0001-01-01T00:00:00+00:00")] {
            assert_eq!(time(micros), clamped);
            assert_eq!(time(micros / 2), clamped);
        }
    }

    #[test]
    fn flags_keep_what_json_values_cannot_hold_as_text() {
        let flags = |text: &str| lenient(text, 0);
        assert_eq!(flags(r#"{"a": true}"#), serde_json::json!({"a": true}));
        assert_eq!(flags(r#"{"a": [true, {"b": 1e400}]}"#), serde_json::json!({"a": [true, {"b": "1e400"}]}));
        assert_eq!(flags("-1e400"), serde_json::json!("-1e400"));
        let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
        assert!(flags(&deep).is_array());
    }

    #[test]
    fn a_name_that_postgresql_would_change_is_refused() {
        for (name, problem) in
            [("", "is empty"), ("a\0b", "NUL"), ("$user", "current role"), (&"x".repeat(64), "63 bytes")]
        {
            let message = Schema::new(name).expect_err("not a legal name").to_string();
            assert!(message.contains(problem), "{message}");
        }
        assert!(Schema::new(&"x".repeat(63)).is_ok());
    }
}
