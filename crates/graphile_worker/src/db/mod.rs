//! The SQL statements, with the schema's name inserted and ready to run, and their parameters. `rows` reads
//! jobs from rows, `connect` connects, `session` deals with sessions and poolers, and `executor` runs the statements of
//! the utilities.
//!
//! SQL files use psql's notation, `:"schema"` for the identifier and `:'schema'` for the text, so that `psql
//! -1 -v schema=graphile_worker -f FILE` can run, prepare or explain them unchanged.

pub(crate) mod connect;
pub(crate) mod executor;
pub(crate) mod rows;
pub(crate) mod session;
mod sql_text;
#[cfg(feature = "tokio-postgres")]
pub(crate) mod tokio_postgres;

use crate::Error;
use chrono::{DateTime, Utc};
use sql_text::without_comments;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::{Query, QueryAs, QueryScalar};
use sqlx::{AssertSqlSafe, PgConnection, Postgres};
use std::sync::Arc;

/// PostgreSQL truncates longer names, so that two schemas could become one.
const LONGEST_NAME: usize = 63;

/// A valid schema name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schema(String);

impl Schema {
    pub(crate) fn new(name: &str) -> Result<Schema, Error> {
        let problem = if name.is_empty() {
            "is empty"
        } else if name.len() > LONGEST_NAME {
            "is longer than 63 bytes, PostgreSQL's limit for names"
        } else if name.contains('\0') {
            "contains a NUL character"
        } else if name == "$user" {
            "is reserved: in search_path it stands for the current role"
        } else {
            return Ok(Schema(name.to_owned()));
        };
        Err(Error::InvalidSchemaName { name: name.to_owned(), problem })
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// The text of an SQL file for this schema. Indexes are created with a lock on the table.
    pub(crate) fn sql(&self, file: &'static str) -> AssertSqlSafe<String> {
        self.text(file, "")
    }

    /// The text of an SQL file for this schema. Indexes are created concurrently, without blocking other
    /// sessions.
    pub(crate) fn sql_concurrently(&self, file: &'static str) -> AssertSqlSafe<String> {
        self.text(file, "concurrently")
    }

    /// The text of an SQL file for this schema and a role, with the names of the role's policies.
    pub(crate) fn sql_for_role(&self, file: &'static str, role: &str, read_policy: &str, run_policy: &str) -> String {
        let names = [role, read_policy, run_policy].map(quote_identifier);
        let placeholders =
            [(":\"role\"", &*names[0]), (":\"read_policy\"", &*names[1]), (":\"run_policy\"", &*names[2])];
        self.replaced(file, &placeholders)
    }

    fn text(&self, file: &'static str, concurrently: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(self.replaced(file, &[(":concurrently", concurrently)]))
    }

    fn replaced(&self, file: &'static str, others: &[(&str, &str)]) -> String {
        let identifier = quote_identifier(&self.0);
        let text = if self.0.contains('\\') {
            format!(" E'{}'", self.0.replace('\\', "\\\\").replace('\'', "''"))
        } else {
            format!("'{}'", self.0.replace('\'', "''"))
        };
        // All placeholders are replaced in one pass, so that a name that looks like a placeholder stays a
        // name.
        let mut placeholders = vec![(":\"schema\"", &*identifier), (":'schema'", &*text)];
        placeholders.extend(others);
        let file = without_comments(file);
        let mut sql = String::with_capacity(file.len() + 1024);
        let mut rest = &*file;
        while let Some((at, placeholder, value)) = placeholders
            .iter()
            .filter_map(|(placeholder, value)| Some((rest.find(placeholder)?, *placeholder, *value)))
            .min()
        {
            sql.push_str(&rest[..at]);
            sql.push_str(value);
            rest = &rest[at + placeholder.len()..];
        }
        sql.push_str(rest);
        sql
    }
}

pub(crate) fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The statements of a worker and of its utilities, ready for one schema.
pub(crate) struct Statements {
    pub(crate) schema: Schema,
    /// Whether a pooler is between us and the database.
    pub(crate) is_pooled: bool,
    pub(crate) exchange: Statement,
    pub(crate) exchange_unqueued: Statement,
    pub(crate) exchange_limited: Statement,
    pub(crate) limits: Statement,
    pub(crate) settle_limits: Statement,
    pub(crate) set_limit: Statement,
    pub(crate) limit_settings: Statement,
    pub(crate) reached_limits: Statement,
    pub(crate) drop_limit: Statement,
    pub(crate) pause: Statement,
    pub(crate) resume: Statement,
    pub(crate) list_limits: Statement,
    pub(crate) doctor_limits: Statement,
    pub(crate) claim_head: Statement,
    pub(crate) deferred_claim: Statement,
    pub(crate) deferred_end: Statement,
    pub(crate) deferred_resume: Statement,
    pub(crate) allow_invalid_utf8: Statement,
    pub(crate) allow_invalid_utf8_in_transaction: Statement,
    pub(crate) current_transaction: Statement,
    pub(crate) transaction_status: Statement,
    pub(crate) held: Statement,
    pub(crate) held_queues: Statement,
    pub(crate) next_run_at: Statement,
    pub(crate) count_workers: Statement,
    pub(crate) terminate_earlier_connections: Statement,
    pub(crate) newer_steps: Statement,
    pub(crate) ensure_tasks: Statement,
    pub(crate) task_ids: Statement,
    pub(crate) complete_in_transaction: Statement,
    pub(crate) clear_stale_locks: Statement,
    pub(crate) keep_locks_fresh: Statement,
    pub(crate) cancellations: Statement,
    pub(crate) cancel_jobs: Statement,
    pub(crate) jobs_by_id: Statement,
    pub(crate) debounce: Statement,
    pub(crate) throttle: Statement,
    pub(crate) add_expiring_job: Statement,
    pub(crate) expire_jobs: Statement,
    pub(crate) replace_job: Statement,
    pub(crate) release_successors: Statement,
    pub(crate) expire_due_jobs: Statement,
    pub(crate) next_expiry: Statement,
    pub(crate) expiries_of: Statement,
    pub(crate) add_job: Statement,
    pub(crate) add_jobs: Statement,
    pub(crate) add_merged_jobs: Statement,
    pub(crate) add_chunk: Statement,
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
    pub(crate) cron_executions: Statement,
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
    pub(crate) why_ahead: Statement,
    pub(crate) why_table_lock: Statement,
    pub(crate) doctor_server: Statement,
    pub(crate) doctor_schema: Statement,
    pub(crate) doctor_tables: Statement,
    pub(crate) doctor_jobs: Statement,
    pub(crate) job_counters: Statement,
    pub(crate) uninstall_contents: Statement,
    pub(crate) uninstall_jobs: Statement,
    pub(crate) uninstall: Statement,
}

const ALLOW_INVALID_UTF8: &str = include_str!("../../sql/queries/allow_invalid_utf8.sql");

/// Lets a connection to a database without an encoding (`SQL_ASCII`) read text that is not UTF-8: invalid
/// bytes become `U+FFFD`. Without it, [`WorkerUtils`](crate::WorkerUtils) fails with PostgreSQL's error if a
/// row contains such text. No effect in other databases. Workers call it themselves.
///
/// ```no_run
/// # async fn example(options: sqlx::postgres::PgConnectOptions) -> sqlx::Result<sqlx::PgPool> {
/// let pool = sqlx::postgres::PgPoolOptions::new().after_connect(|connection, _| {
///     Box::pin(graphile_worker::allow_invalid_utf8(connection))
/// });
/// pool.connect_with(options).await
/// # }
/// ```
pub async fn allow_invalid_utf8(connection: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(AssertSqlSafe(without_comments(ALLOW_INVALID_UTF8))).execute(connection).await.map(drop)
}

/// The text of a statement. Cheap to clone, because the driver takes it by value.
#[derive(Clone)]
pub(crate) struct Statement {
    text: Arc<str>,
    pub(crate) is_pooled: bool,
}

impl Statement {
    #[cfg(feature = "tokio-postgres")]
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// A query to bind and run. It is prepared once per connection, but never behind a pooler.
    pub(crate) fn query(&self) -> Query<'static, Postgres, PgArguments> {
        sqlx::query(self.sql()).persistent(!self.is_pooled)
    }

    /// The same, reading the first column.
    pub(crate) fn query_scalar<O>(&self) -> QueryScalar<'static, Postgres, O, PgArguments>
    where
        (O,): for<'r> sqlx::FromRow<'r, PgRow>,
    {
        sqlx::query_scalar(self.sql()).persistent(!self.is_pooled)
    }

    /// The same, reading rows of a type.
    pub(crate) fn query_as<O: for<'r> sqlx::FromRow<'r, PgRow>>(&self) -> QueryAs<'static, Postgres, O, PgArguments> {
        sqlx::query_as(self.sql()).persistent(!self.is_pooled)
    }

    pub(crate) fn sql(&self) -> AssertSqlSafe<Arc<str>> {
        AssertSqlSafe(self.text.clone())
    }
}

impl Statements {
    pub(crate) fn new(schema: Schema, is_pooled: bool) -> Statements {
        let statement = |file: &'static str| Statement { text: schema.sql(file).0.into(), is_pooled };
        Statements {
            is_pooled,
            exchange: statement(include_str!("../../sql/queries/exchange.sql")),
            exchange_unqueued: statement(include_str!("../../sql/queries/exchange_unqueued.sql")),
            exchange_limited: statement(include_str!("../../sql/queries/exchange_limited.sql")),
            limits: statement(include_str!("../../sql/queries/limits.sql")),
            settle_limits: statement(include_str!("../../sql/queries/settle_limits.sql")),
            set_limit: statement(include_str!("../../sql/queries/set_limit.sql")),
            limit_settings: statement(include_str!("../../sql/queries/limit_settings.sql")),
            reached_limits: statement(include_str!("../../sql/queries/reached_limits.sql")),
            drop_limit: statement(include_str!("../../sql/queries/drop_limit.sql")),
            pause: statement(include_str!("../../sql/queries/pause.sql")),
            resume: statement(include_str!("../../sql/queries/resume.sql")),
            list_limits: statement(include_str!("../../sql/queries/list_limits.sql")),
            doctor_limits: statement(include_str!("../../sql/queries/doctor_limits.sql")),
            claim_head: statement(include_str!("../../sql/queries/claim_head.sql")),
            deferred_claim: statement(include_str!("../../sql/queries/deferred_claim.sql")),
            deferred_end: statement(include_str!("../../sql/queries/deferred_end.sql")),
            deferred_resume: statement(include_str!("../../sql/queries/deferred_resume.sql")),
            allow_invalid_utf8: statement(ALLOW_INVALID_UTF8),
            allow_invalid_utf8_in_transaction: statement(include_str!(
                "../../sql/queries/allow_invalid_utf8_in_transaction.sql"
            )),
            current_transaction: statement(include_str!("../../sql/queries/current_transaction.sql")),
            transaction_status: statement(include_str!("../../sql/queries/transaction_status.sql")),
            held: statement(include_str!("../../sql/queries/held.sql")),
            held_queues: statement(include_str!("../../sql/queries/held_queues.sql")),
            terminate_earlier_connections: statement(include_str!(
                "../../sql/queries/terminate_earlier_connections.sql"
            )),
            count_workers: statement(include_str!("../../sql/queries/count_workers.sql")),
            next_run_at: statement(include_str!("../../sql/queries/next_run_at.sql")),
            newer_steps: statement(include_str!("../../sql/queries/newer_steps.sql")),
            ensure_tasks: statement(include_str!("../../sql/queries/ensure_tasks.sql")),
            task_ids: statement(include_str!("../../sql/queries/task_ids.sql")),
            complete_in_transaction: statement(include_str!("../../sql/queries/complete_in_transaction.sql")),
            keep_locks_fresh: statement(include_str!("../../sql/queries/keep_locks_fresh.sql")),
            cancellations: statement(include_str!("../../sql/queries/cancellations.sql")),
            cancel_jobs: statement(include_str!("../../sql/queries/cancel_jobs.sql")),
            jobs_by_id: statement(include_str!("../../sql/queries/jobs_by_id.sql")),
            debounce: statement(include_str!("../../sql/queries/debounce.sql")),
            throttle: statement(include_str!("../../sql/queries/throttle.sql")),
            add_expiring_job: statement(include_str!("../../sql/queries/add_expiring_job.sql")),
            expire_jobs: statement(include_str!("../../sql/queries/expire_jobs.sql")),
            replace_job: statement(include_str!("../../sql/queries/replace_job.sql")),
            release_successors: statement(include_str!("../../sql/queries/release_successors.sql")),
            expire_due_jobs: statement(include_str!("../../sql/queries/expire_due_jobs.sql")),
            next_expiry: statement(include_str!("../../sql/queries/next_expiry.sql")),
            expiries_of: statement(include_str!("../../sql/queries/expiries_of.sql")),
            clear_stale_locks: statement(include_str!("../../sql/queries/clear_stale_locks.sql")),
            add_job: statement(include_str!("../../sql/queries/add_job.sql")),
            add_jobs: statement(include_str!("../../sql/queries/add_jobs.sql")),
            add_merged_jobs: statement(include_str!("../../sql/queries/add_merged_jobs.sql")),
            add_chunk: statement(include_str!("../../sql/queries/add_chunk.sql")),
            job_names: statement(include_str!("../../sql/queries/job_names.sql")),
            is_same_transaction: statement(include_str!("../../sql/queries/is_same_transaction.sql")),
            notify_jobs: statement(include_str!("../../sql/queries/notify_jobs.sql")),
            remove_job: statement(include_str!("../../sql/queries/remove_job.sql")),
            complete_jobs: statement(include_str!("../../sql/queries/complete_jobs.sql")),
            permanently_fail_jobs: statement(include_str!("../../sql/queries/permanently_fail_jobs.sql")),
            reschedule_jobs: statement(include_str!("../../sql/queries/reschedule_jobs.sql")),
            force_unlock_workers: statement(include_str!("../../sql/queries/force_unlock_workers.sql")),
            delete_unused_names: statement(include_str!("../../sql/queries/delete_unused_names.sql")),
            delete_failed_jobs: statement(include_str!("../../sql/queries/delete_failed_jobs.sql")),
            queue_name: statement(include_str!("../../sql/queries/queue_name.sql")),
            cron_time: statement(include_str!("../../sql/queries/cron_time.sql")),
            cron_known: statement(include_str!("../../sql/queries/cron_known.sql")),
            cron_ticks: statement(include_str!("../../sql/queries/cron_ticks.sql")),
            cron_items: statement(include_str!("../../sql/queries/cron_items.sql")),
            cron_executions: statement(include_str!("../../sql/queries/cron_executions.sql")),
            recovery_lock: statement(include_str!("../../sql/queries/recovery_lock.sql")),
            recovery_dead_workers: statement(include_str!("../../sql/queries/recovery_dead_workers.sql")),
            recovery_jobs: statement(include_str!("../../sql/queries/recovery_jobs.sql")),
            recovery_recover: statement(include_str!("../../sql/queries/recovery_recover.sql")),
            recovery_forget: statement(include_str!("../../sql/queries/recovery_forget.sql")),
            recovery_swept: statement(include_str!("../../sql/queries/recovery_swept.sql")),
            recovery_register: statement(include_str!("../../sql/queries/recovery_register.sql")),
            recovery_heartbeat: statement(include_str!("../../sql/queries/recovery_heartbeat.sql")),
            recovery_leave: statement(include_str!("../../sql/queries/recovery_leave.sql")),
            recovery_workers: statement(include_str!("../../sql/queries/recovery_workers.sql")),
            list_jobs: statement(include_str!("../../sql/queries/list_jobs.sql")),
            find_job: statement(include_str!("../../sql/queries/find_job.sql")),
            stats: statement(include_str!("../../sql/queries/stats.sql")),
            list_queues: statement(include_str!("../../sql/queries/list_queues.sql")),
            list_workers: statement(include_str!("../../sql/queries/list_workers.sql")),
            why: statement(include_str!("../../sql/queries/why.sql")),
            why_ahead: statement(include_str!("../../sql/queries/why_ahead.sql")),
            why_table_lock: statement(include_str!("../../sql/queries/why_table_lock.sql")),
            doctor_server: statement(include_str!("../../sql/queries/doctor_server.sql")),
            doctor_schema: statement(include_str!("../../sql/queries/doctor_schema.sql")),
            doctor_tables: statement(include_str!("../../sql/queries/doctor_tables.sql")),
            doctor_jobs: statement(include_str!("../../sql/queries/doctor_jobs.sql")),
            job_counters: statement(include_str!("../../sql/queries/job_counters.sql")),
            uninstall_contents: statement(include_str!("../../sql/queries/uninstall_contents.sql")),
            uninstall_jobs: statement(include_str!("../../sql/queries/uninstall_jobs.sql")),
            uninstall: statement(include_str!("../../sql/queries/uninstall.sql")),
            schema,
        }
    }
}

/// A parameter of a statement.
pub(crate) enum Parameter {
    Text(Option<String>),
    Time(Option<DateTime<Utc>>),
    Int(Option<i32>),
    Bool(bool),
    Float(Option<f64>),
    Ids(Vec<i64>),
    Ints(Vec<Option<i32>>),
    TextArray(Option<Vec<String>>),
    Texts(Vec<Option<String>>),
    Times(Vec<Option<DateTime<Utc>>>),
    Shorts(Vec<Option<i16>>),
}

/// Binds the parameters to a statement.
pub(crate) fn bound(statement: &Statement, parameters: Vec<Parameter>) -> Query<'static, Postgres, PgArguments> {
    parameters.into_iter().fold(statement.query(), |query, parameter| match parameter {
        Parameter::Text(value) => query.bind(value),
        Parameter::Time(value) => query.bind(value),
        Parameter::Int(value) => query.bind(value),
        Parameter::Bool(value) => query.bind(value),
        Parameter::Float(value) => query.bind(value),
        Parameter::Ids(value) => query.bind(value),
        Parameter::Ints(value) => query.bind(value),
        Parameter::TextArray(value) => query.bind(value),
        Parameter::Texts(value) => query.bind(value),
        Parameter::Times(value) => query.bind(value),
        Parameter::Shorts(value) => query.bind(value),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sql(schema: &str, file: &'static str) -> String {
        Schema::new(schema).expect("a valid name").sql(file).0
    }

    #[test]
    fn a_schema_name_is_quoted_everywhere() {
        assert_eq!(sql("plain", r#"from :"schema".jobs"#), r#"from "plain".jobs"#);
        assert_eq!(sql(r#"it's "mine""#, r#":"schema" :'schema'"#), r#""it's ""mine""" 'it''s "mine"'"#);
        assert_eq!(sql(r"back\slash", r#":"schema" :'schema'"#), r#""back\slash"  E'back\\slash'"#);
    }

    #[test]
    fn a_schema_name_that_looks_like_a_placeholder_is_left_alone() {
        assert_eq!(sql(":'schema'", r#"a :"schema" b"#), r#"a ":'schema'" b"#);
    }

    #[test]
    fn a_name_that_postgresql_would_change_is_rejected() {
        for (name, problem) in
            [("", "is empty"), ("a\0b", "NUL"), ("$user", "current role"), (&"x".repeat(64), "63 bytes")]
        {
            let message = Schema::new(name).expect_err("an invalid name").to_string();
            assert!(message.contains(problem), "{message}");
        }
        assert!(Schema::new(&"x".repeat(63)).is_ok());
    }
}
