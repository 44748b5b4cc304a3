//! Test databases: each test gets a copy of a template that is installed once.

use crate::cluster::{Registration, random_hex, short_hash};
use crate::error::Context;
use crate::{Cluster, Error};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Once, mpsc};

/// How many templates to keep. Older ones belong to earlier schema versions.
const TEMPLATES_KEPT: i64 = 12;

/// A test database. Dropped with this value, unless the test panics: then its URL is printed, and it is kept
/// for ten minutes or until the next run.
#[derive(Debug)]
pub struct TestDatabase {
    name: String,
    url: String,
    options: PgConnectOptions,
    maintenance: PgConnectOptions,
    users: PathBuf,
    /// Keeps the server running.
    _registration: Arc<Registration>,
}

impl TestDatabase {
    /// Options to connect to it over the cluster's Unix socket.
    pub fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// Its URL over TCP.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the test database is kept for ten minutes, or until the next run: psql {}", self.url);
            keep_server_running(&self.users);
        } else {
            let _ = JANITOR.send((self.maintenance.clone(), self.name.clone()));
        }
    }
}

/// Starts an idle process that counts as a user of the server.
fn keep_server_running(users: &Path) {
    static KEEPER: Once = Once::new();
    KEEPER.call_once(|| {
        let idle = || Stdio::null();
        let sleep = Command::new("sleep").arg("600").stdin(idle()).stdout(idle()).stderr(idle()).spawn();
        if let Ok(sleep) = sleep {
            let _ = std::fs::write(users.join(format!("{}-kept", sleep.id())), "");
        }
    });
}

/// Drops databases in the background, so that tests do not wait for it. The next process drops those that are
/// left when this one ends.
static JANITOR: LazyLock<mpsc::Sender<(PgConnectOptions, String)>> = LazyLock::new(|| {
    let (sender, names) = mpsc::channel::<(PgConnectOptions, String)>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        for (maintenance, name) in names {
            runtime.block_on(async {
                if let Ok(mut connection) = PgConnection::connect_with(&maintenance).await {
                    let _ = drop_database(&mut connection, &name).await;
                }
            });
        }
    });
    sender
});

impl Cluster {
    /// Creates a database from a template that `install` prepares. `template` names its contents (a version,
    /// or a hash of a schema); each name is installed once across all tests and processes.
    pub async fn database<I>(&self, template: &str, install: I) -> Result<TestDatabase, Error>
    where
        I: AsyncFnOnce(PgConnectOptions) -> Result<(), Box<dyn std::error::Error + Send + Sync>>,
    {
        static DATABASES: AtomicU32 = AtomicU32::new(0);
        let number = DATABASES.fetch_add(1, Ordering::Relaxed);
        // Process ids are reused, and an earlier process may have left databases.
        let name = format!("test_{}_{number}_{}", std::process::id(), &random_hex()?[..8]);
        let source = format!("template_{}", short_hash(template));
        let maintenance = self.options("postgres");
        let mut connection = PgConnection::connect_with(&maintenance)
            .await
            .context(|| "connect to the private PostgreSQL".to_owned())?;

        if number == 0 {
            self.sweep(&mut connection).await?;
        }
        let copy = format!("create database {name} template {source}");
        let mut copied = sqlx::query(AssertSqlSafe(copy.clone())).execute(&mut connection).await;
        if copied.as_ref().is_err_and(is_missing_database) {
            self.install_template(&mut connection, template, &source, install).await?;
            copied = sqlx::query(AssertSqlSafe(copy)).execute(&mut connection).await;
        }
        copied.context(|| format!("copy the template database `{template}`"))?;
        Ok(TestDatabase {
            url: self.url(&name),
            options: self.options(&name),
            maintenance,
            users: self.folder.users(),
            _registration: self.registration.clone(),
            name,
        })
    }

    async fn install_template<I>(
        &self,
        connection: &mut PgConnection,
        template: &str,
        source: &str,
        install: I,
    ) -> Result<(), Error>
    where
        I: AsyncFnOnce(PgConnectOptions) -> Result<(), Box<dyn std::error::Error + Send + Sync>>,
    {
        // One process installs while the others wait. An advisory lock, because a file lock would block the
        // runtime.
        let context = || format!("install the template database `{template}`");
        sqlx::query("select pg_advisory_lock(hashtext($1))")
            .bind(source)
            .execute(&mut *connection)
            .await
            .context(context)?;
        let exists = sqlx::query_scalar::<_, bool>("select exists (select from pg_database where datname = $1)")
            .bind(source)
            .fetch_one(&mut *connection)
            .await
            .context(context)?;
        if !exists {
            drop_old_templates(connection).await.context(context)?;
            let unfinished = format!("{source}_unfinished");
            drop_database(connection, &unfinished).await.context(context)?;
            execute(connection, format!("create database {unfinished}")).await.context(context)?;
            install(self.options(&unfinished))
                .await
                .map_err(|source| Error::Template { template: template.to_owned(), source })?;
            // Disallow connections: a template that is in use cannot be copied.
            execute(connection, format!("alter database {unfinished} allow_connections false"))
                .await
                .context(context)?;
            terminate_connections(connection, &unfinished).await.context(context)?;
            execute(connection, format!("alter database {unfinished} rename to {source}")).await.context(context)?;
        }
        sqlx::query("select pg_advisory_unlock(hashtext($1))")
            .bind(source)
            .execute(&mut *connection)
            .await
            .context(context)?;
        Ok(())
    }

    /// Drops the databases of test processes that have ended.
    async fn sweep(&self, connection: &mut PgConnection) -> Result<(), Error> {
        let context = || "drop the databases of earlier tests".to_owned();
        let names: Vec<String> =
            sqlx::query_scalar(r"select datname::text from pg_database where datname ~ '^test_\d+_\d+_[0-9a-f]+$'")
                .fetch_all(&mut *connection)
                .await
                .context(context)?;
        let alive = self.folder.live_users();
        for name in names {
            let owner = name.split('_').nth(1).and_then(|pid| pid.parse().ok());
            if !owner.is_some_and(|pid| alive.contains(&pid)) {
                // Another process may be dropping the same one.
                let _ = drop_database(connection, &name).await;
            }
        }
        Ok(())
    }
}

/// SQLSTATE 3D000: the template of `create database … template` does not exist.
fn is_missing_database(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "3D000")
}

async fn execute(connection: &mut PgConnection, statement: String) -> sqlx::Result<()> {
    sqlx::query(AssertSqlSafe(statement)).execute(connection).await.map(|_| ())
}

async fn terminate_connections(connection: &mut PgConnection, name: &str) -> sqlx::Result<()> {
    sqlx::query("select pg_terminate_backend(pid) from pg_stat_activity where datname = $1")
        .bind(name)
        .execute(connection)
        .await
        .map(|_| ())
}

async fn drop_database(connection: &mut PgConnection, name: &str) -> sqlx::Result<()> {
    terminate_connections(connection, name).await?;
    execute(connection, format!("drop database if exists {name}")).await
}

async fn drop_old_templates(connection: &mut PgConnection) -> sqlx::Result<()> {
    let old: Vec<String> = sqlx::query_scalar(
        "select datname::text from pg_database where datname ~ '^template_[0-9a-f]{16}$' order by oid desc offset $1",
    )
    .bind(TEMPLATES_KEPT)
    .fetch_all(&mut *connection)
    .await?;
    for name in old {
        drop_database(connection, &name).await?;
    }
    Ok(())
}
