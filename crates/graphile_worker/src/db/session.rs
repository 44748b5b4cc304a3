//! Sessions of the worker's own connections, and poolers such as PgBouncer: how to detect one, and how to run
//! statements through it. `connect` opens the connections.
//!
//! A pooler in transaction mode gives each transaction any free server connection. So behind a pooler
//! - every statement runs in an explicit transaction: the driver sends parse and bind separately, and both
//!   must reach the same server connection;
//! - statements have no names and settings are `set local`, so that nothing of ours stays in the server
//!   connection for the next client;
//! - a transaction may start or end with notifications, if another client has left a LISTEN on the server
//!   connection. The driver reports them as an error, although the server has run the statement.

use crate::db::connect::DatabaseConfig;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool, Postgres, Row, Transaction};
use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;

/// A setting of a session. A value with commas is a list.
pub(crate) type Setting = (&'static str, Cow<'static, str>);

/// The setting that reveals a pooler: no server has this value by default.
pub(crate) const POOLER_PROBE_SETTING: (&str, &str) = ("plan_cache_mode", "force_generic_plan");

/// The settings of the worker's own connections. A worker's statements are planned once, and must use an
/// index in its order, whatever the statistics say: with statistics from a time when no job was locked,
/// PostgreSQL scanned the whole table for each report (280 ms for 1,000 of 200,000 jobs). A pooler does not
/// pass these settings on. Behind one, each transaction sets them, and statements are planned every time.
///
/// `search_path` keeps functions and operators of other schemas from replacing PostgreSQL's own. The
/// statements are written so that this holds without the setting, too (`tests/it/search_path`).
const OWN_CONNECTIONS: [(&str, &str); 8] = [
    ("search_path", "pg_catalog, pg_temp"),
    POOLER_PROBE_SETTING,
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_sort", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
];

/// Default time to wait for an answer before the worker closes the connection. An exchange takes milliseconds
/// and waits at most 100 ms for a lock, but a healthy server may be silent for seconds: a full disk cache, a
/// checkpoint, a migrating virtual machine. 20 seconds are more than that, and less than most alarms wait.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// The order in which two connections query their server process. A pooler that reuses the most recent server
/// connection gives both the same one; a pooler that rotates gives one of them two different ones in a row.
const ORDER: [usize; 12] = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1];

/// The configuration of the worker's own connections, derived from the application's.
pub(crate) fn own(config: DatabaseConfig) -> DatabaseConfig {
    // The worker logs slow statements itself, without the SQL.
    config.application_name("graphile_worker").with(ConnectOptions::disable_statement_logging)
}

/// The settings of the worker's own connections. The server cancels a statement before the worker closes the
/// connection.
pub(crate) fn own_settings(answer_timeout: Duration) -> Vec<Setting> {
    let statement_timeout = format!("{}ms", (answer_timeout * 5 / 6).as_millis());
    let settings = OWN_CONNECTIONS.into_iter().map(|(name, value)| (name, value.into()));
    settings.chain([("statement_timeout", statement_timeout.into())]).collect()
}

/// A session like a worker's, to detect a pooler.
pub(crate) fn session_to_detect(config: DatabaseConfig) -> Session {
    Session::new(own(config), own_settings(ANSWER_TIMEOUT), false)
}

/// How to open the worker's own connections, and the settings of their statements.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    config: DatabaseConfig,
    name: Option<String>,
    settings: Vec<Setting>,
    /// The first statement of each transaction behind a pooler.
    preamble: Option<Arc<str>>,
    is_pooled: bool,
}

impl Session {
    pub(crate) fn new(config: DatabaseConfig, settings: Vec<Setting>, is_pooled: bool) -> Session {
        Session { config, name: None, settings, preamble: None, is_pooled }
    }

    /// The same session with another application name, which PostgreSQL shows in `pg_stat_activity`. Not used
    /// behind a pooler, where the name would stay with the server connection.
    pub(crate) fn named(mut self, name: &str) -> Session {
        self.name = Some(name.to_owned());
        self
    }

    /// The same session with more settings. The last setting of a name wins.
    pub(crate) fn with(mut self, settings: &[(&'static str, &'static str)]) -> Session {
        self.settings.extend(settings.iter().map(|(name, value)| (*name, (*value).into())));
        self
    }

    /// Sets the first statement of each transaction; only used behind a pooler.
    pub(crate) fn set_preamble(&mut self, statement: AssertSqlSafe<Arc<str>>) {
        self.preamble = Some(statement.0);
    }

    pub(crate) fn is_pooled(&self) -> bool {
        self.is_pooled
    }

    /// The configuration without name and settings.
    pub(crate) fn config(&self) -> &DatabaseConfig {
        &self.config
    }

    /// How long [`connect`](Session::connect) takes at most.
    pub(crate) fn time_to_connect(&self) -> Duration {
        self.config.time_to_connect()
    }

    /// The configuration with name and settings; behind a pooler without.
    pub(crate) fn config_with_settings(&self) -> DatabaseConfig {
        if self.is_pooled {
            return self.config.clone();
        }
        let config = self.config.clone().options(self.settings.iter().map(|(name, value)| (*name, &**value)));
        let config = config.with_keepalives();
        match &self.name {
            Some(name) => config.application_name(name),
            None => config,
        }
    }

    pub(crate) async fn connect(&self) -> sqlx::Result<PgConnection> {
        self.config_with_settings().connection().await
    }

    /// Connects and detects a pooler: it rejects the settings, or does not pass them on.
    pub(crate) async fn connect_and_detect(&mut self) -> sqlx::Result<PgConnection> {
        if self.is_pooled {
            return self.connect().await;
        }
        match self.connect().await {
            Ok(mut connection) => {
                let checking =
                    tokio::time::timeout(self.time_to_connect(), settings_are_in_effect(&mut connection)).await;
                if checking.unwrap_or_else(|_| Err(sqlx::Error::Io(io::ErrorKind::TimedOut.into())))? {
                    return Ok(connection);
                }
                let _ = connection.close().await;
            }
            Err(error) if is_rejected_parameter(&error) => {
                debug!(label = "worker", %error, "the pooler rejected the settings; connecting without them");
            }
            Err(error) => return Err(error),
        }
        let connection = self.config.connection().await?;
        self.is_pooled = true;
        Ok(connection)
    }

    /// Begins a transaction in which the settings apply.
    pub(crate) async fn begin<'c>(&self, connection: &'c mut PgConnection) -> sqlx::Result<Transaction<'c, Postgres>> {
        if !self.is_pooled {
            return connection.begin().await;
        }
        connection.begin_with(AssertSqlSafe(self.begin_text())).await
    }

    fn begin_text(&self) -> String {
        let mut begin = "begin isolation level read committed".to_owned();
        for (position, (name, value)) in self.settings.iter().enumerate() {
            if !self.settings[position + 1..].iter().any(|(later, _)| later == name) {
                // Quoted as a whole, a list would be the name of a single schema.
                let values: Vec<String> = value.split(", ").map(|value| format!("'{value}'")).collect();
                begin.push_str(&format!("; set local {name} = {}", values.join(", ")));
            }
        }
        if let Some(preamble) = &self.preamble {
            begin.push_str("; ");
            begin.push_str(preamble);
        }
        begin
    }

    /// Runs a single statement.
    pub(crate) async fn fetch_all(
        &self,
        connection: &mut PgConnection,
        query: Query<'_, Postgres, PgArguments>,
    ) -> sqlx::Result<Vec<PgRow>> {
        if !self.is_pooled {
            return query.fetch_all(connection).await;
        }
        let mut transaction = self.begin(connection).await?;
        let rows = query.persistent(false).fetch_all(&mut *transaction).await;
        end(transaction, rows).await
    }

    /// The same for a statement that returns exactly one row.
    pub(crate) async fn fetch_one(
        &self,
        connection: &mut PgConnection,
        query: Query<'_, Postgres, PgArguments>,
    ) -> sqlx::Result<PgRow> {
        self.fetch_all(connection, query).await?.into_iter().next().ok_or(sqlx::Error::RowNotFound)
    }
}

/// Runs a single statement on a connection of a pool.
pub(crate) async fn fetch_all(
    pool: &PgPool,
    is_pooled: bool,
    query: Query<'_, Postgres, PgArguments>,
) -> sqlx::Result<Vec<PgRow>> {
    fetch_all_on(&mut *pool.acquire().await?, is_pooled, query).await
}

/// Runs a single statement on this connection.
pub(crate) async fn fetch_all_on(
    connection: &mut PgConnection,
    is_pooled: bool,
    query: Query<'_, Postgres, PgArguments>,
) -> sqlx::Result<Vec<PgRow>> {
    if !is_pooled {
        return query.fetch_all(connection).await;
    }
    let mut transaction = connection.begin().await?;
    let rows = query.persistent(false).fetch_all(&mut *transaction).await;
    end(transaction, rows).await
}

/// Begins a transaction on a connection of the application, in which no object of others can be taken for one of PostgreSQL's
/// own. Read committed, whatever the database's default is: what is read after waiting for a lock must be what the session
/// before has left.
pub(crate) const BEGIN: &str = "begin isolation level read committed; set local search_path = pg_catalog, pg_temp";

/// The same as [`fetch_all_on`], in such a transaction.
pub(crate) async fn fetch_all_safely_on(
    connection: &mut PgConnection,
    is_pooled: bool,
    query: Query<'_, Postgres, PgArguments>,
) -> sqlx::Result<Vec<PgRow>> {
    if connection.is_in_transaction() {
        // One that has begun like this.
        return fetch_all_on(connection, is_pooled, query).await;
    }
    let mut transaction = connection.begin_with(BEGIN).await?;
    let query = if is_pooled { query.persistent(false) } else { query };
    let rows = query.fetch_all(&mut *transaction).await;
    end(transaction, rows).await
}

/// Runs a query without parameters that changes nothing, in one message; once more if a notification came with it. The path
/// is set for this message, or for the transaction that is open.
pub(crate) async fn read(connection: &mut PgConnection, sql: AssertSqlSafe<String>) -> sqlx::Result<Vec<PgRow>> {
    let sql = AssertSqlSafe(format!("set local search_path = pg_catalog, pg_temp; {}", sql.0));
    let mut attempts_left = 20;
    loop {
        match sqlx::raw_sql(AssertSqlSafe(sql.0.clone())).fetch_all(&mut *connection).await {
            Err(error) if attempts_left > 0 && is_notification(&error) => attempts_left -= 1,
            rows => return rows,
        }
    }
}

async fn end<T>(transaction: Transaction<'_, Postgres>, result: sqlx::Result<T>) -> sqlx::Result<T> {
    match result {
        Ok(value) => commit(transaction).await.map(|()| value),
        Err(error) => {
            // Return the first error. The next use finds out if the connection cannot even roll back.
            let _ = rollback(transaction).await;
            Err(error)
        }
    }
}

/// Commits. Ignores a notification that arrives with the answer: the server sends it after it has confirmed
/// the commit.
pub async fn commit(transaction: Transaction<'_, Postgres>) -> sqlx::Result<()> {
    ignoring_notification(transaction.commit().await)
}

/// The same for a rollback.
pub(crate) async fn rollback(transaction: Transaction<'_, Postgres>) -> sqlx::Result<()> {
    ignoring_notification(transaction.rollback().await)
}

fn ignoring_notification(ended: sqlx::Result<()>) -> sqlx::Result<()> {
    match ended {
        Err(error) if is_notification(&error) => Ok(()),
        ended => ended,
    }
}

/// Whether this is a notification for another client that has left a LISTEN on the server connection.
fn is_notification(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Protocol(problem) if problem.contains("NotificationResponse"))
}

/// Whether the settings of the connection are in effect.
async fn settings_are_in_effect(connection: &mut PgConnection) -> sqlx::Result<bool> {
    let (name, value) = POOLER_PROBE_SETTING;
    let row = sqlx::raw_sql(AssertSqlSafe(format!("show {name}"))).fetch_one(connection).await?;
    Ok(row.try_get::<&str, _>(0)? == value)
}

/// Whether a pooler rejected a startup parameter: PgBouncer names it, Amazon's proxy calls it a command-line
/// option.
pub(crate) fn is_rejected_parameter(error: &sqlx::Error) -> bool {
    // With several servers, the error contains the message of each.
    let message = match error {
        sqlx::Error::Database(error) => error.message().to_owned(),
        sqlx::Error::Io(error) => error.to_string(),
        _ => return false,
    };
    message.contains("unsupported startup parameter") || message.contains("command-line options")
}

/// Whether each client connection keeps its server connection, as in session mode: only then can it listen.
/// An unexpected notification shows that it does not.
pub(crate) async fn keeps_sessions(config: &DatabaseConfig) -> sqlx::Result<bool> {
    // Both connections must go to the same server.
    let options = config.current_options().await?;
    let mut connections = [PgConnection::connect_with(&options).await?, PgConnection::connect_with(&options).await?];
    let mut processes: [Option<i32>; 2] = [None, None];
    for index in ORDER {
        let process = match sqlx::raw_sql("select pg_catalog.pg_backend_pid()").fetch_one(&mut connections[index]).await
        {
            Ok(row) => Some(row.try_get(0)?),
            Err(error) if is_notification(&error) => return Ok(false),
            Err(error) => return Err(error),
        };
        if processes[index].is_some_and(|before| Some(before) != process) || processes[1 - index] == process {
            return Ok(false);
        }
        processes[index] = process;
    }
    for connection in connections {
        let _ = connection.close().await;
    }
    Ok(true)
}

/// Whether statements on this connection reach different server connections. Also false if they could, but
/// did not.
pub(crate) async fn is_shared(connection: &mut PgConnection) -> sqlx::Result<bool> {
    let mut before: Option<i32> = None;
    for _ in ORDER {
        let row = match sqlx::raw_sql("select pg_catalog.pg_backend_pid()").fetch_one(&mut *connection).await {
            Err(error) if is_notification(&error) => return Ok(true),
            row => row?,
        };
        let process = row.try_get(0)?;
        if before.is_some_and(|before| before != process) {
            return Ok(true);
        }
        before = Some(process);
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_behind_a_pooler_begins_with_the_last_setting_of_each_name() {
        let config = DatabaseConfig::parse("host=h").expect("a connection string");
        let settings = vec![("search_path", "pg_catalog, pg_temp".into()), ("lock_timeout", "5s".into())];
        let mut session = Session::new(config, settings, true).with(&[("lock_timeout", "100ms")]);
        let begin = "begin isolation level read committed; set local search_path = 'pg_catalog', 'pg_temp'; \
                     set local lock_timeout = '100ms'";
        assert_eq!(session.begin_text(), begin);
        session.set_preamble(AssertSqlSafe("select 1;".into()));
        assert_eq!(session.begin_text(), format!("{begin}; select 1;"));
    }
}
