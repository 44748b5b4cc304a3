//! The private PostgreSQL: a fresh database for every run, copied from a template in which the contestant has installed
//! its schema.

use crate::Failure;
use crate::child::Child;
use crate::contestant::{Contestant, Home};
use crate::usage;
use graphile_worker_devdb::{Cluster, ClusterOptions};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::collections::HashSet;
use tokio::sync::Mutex;

/// The settings of the worker's own connections: the same as `OWN_CONNECTIONS` in the library.
pub(crate) fn as_the_worker_connects(options: PgConnectOptions) -> PgConnectOptions {
    options.options([
        ("plan_cache_mode", "force_generic_plan"),
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
        ("enable_sort", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        ("jit", "off"),
        ("statement_timeout", "50s"),
    ])
}

/// Enough for 64 workers of each contestant, with a pool each. The only setting of the server that is
/// not PostgreSQL's default.
pub(crate) const CONNECTIONS: &str = "1000";

/// A private PostgreSQL, in a folder that is deleted with it.
pub(crate) struct Server {
    cluster: Cluster,
    postmaster: u32,
    /// The schemas for which a template database exists.
    installed: Mutex<HashSet<Home>>,
}

/// A database for one run.
pub(crate) struct Database {
    pub(crate) url: String,
    pub(crate) options: PgConnectOptions,
}

/// Jobs to insert into the table; see fill.sql.
pub(crate) struct Jobs {
    pub(crate) task: &'static str,
    pub(crate) count: u64,
    pub(crate) due_in_seconds: f64,
    pub(crate) priority: i32,
    pub(crate) attempts: i32,
    pub(crate) queues: u64,
    /// How many bytes a payload has besides.
    pub(crate) bytes: u64,
    pub(crate) flag: Option<&'static str>,
    /// Over how many new tasks they are spread, named after `task`; 0 for `task` itself.
    pub(crate) tasks: u64,
}

impl Jobs {
    /// Jobs that are due, without a queue.
    pub(crate) fn ready(count: u64) -> Jobs {
        Jobs {
            task: "trivial",
            count,
            due_in_seconds: 0.0,
            priority: 0,
            attempts: 0,
            queues: 0,
            bytes: 0,
            flag: None,
            tasks: 0,
        }
    }

    /// Jobs that are due, spread over named queues.
    pub(crate) fn queued(count: u64, queues: u64) -> Jobs {
        Jobs { task: "ordered", queues, ..Jobs::ready(count) }
    }
}

impl Server {
    pub(crate) async fn start() -> Result<Server, Failure> {
        let folder = std::env::temp_dir().join(format!("graphile-worker-bench-{}", std::process::id()));
        let options = ClusterOptions::new(folder).setting("max_connections", CONNECTIONS);
        let cluster = tokio::task::spawn_blocking(|| options.open()).await??;
        let mut connection = PgConnection::connect_with(&cluster.options("postgres")).await?;
        let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut connection).await?;
        let postmaster = usage::parent(u32::try_from(backend)?)?;
        Ok(Server { cluster, postmaster, installed: Mutex::default() })
    }

    pub(crate) async fn stop(self) -> Result<(), Failure> {
        let folder = self.cluster.folder().to_owned();
        self.cluster.stop()?;
        Ok(std::fs::remove_dir_all(folder)?)
    }

    pub(crate) async fn version(&self) -> Result<String, Failure> {
        let mut connection = PgConnection::connect_with(&self.cluster.options("postgres")).await?;
        let version: String = sqlx::query_scalar("show server_version").fetch_one(&mut connection).await?;
        Ok(version.split_whitespace().next().unwrap_or_default().to_owned())
    }

    /// CPU seconds of all its processes so far.
    pub(crate) fn processor_seconds(&self) -> Result<f64, Failure> {
        usage::of_family(self.postmaster)
    }

    /// Changes a setting of the whole server, or resets it to its default.
    pub(crate) async fn set(&self, name: &str, value: Option<&str>) -> Result<(), Failure> {
        match value {
            Some(value) => self.maintain(&format!("alter system set {name} = '{value}'")).await?,
            None => self.maintain(&format!("alter system reset {name}")).await?,
        }
        self.maintain("select pg_reload_conf()").await
    }

    /// A new database with the contestant's schema and tasks, and no jobs.
    pub(crate) async fn fresh_database(&self, contestant: Contestant) -> Result<Database, Failure> {
        let template = self.template(contestant.home()).await?;
        let name = format!("{:?}", contestant.home()).to_lowercase() + "_" + contestant.variant();
        self.maintain(&format!("drop database if exists \"{name}\" with (force)")).await?;
        self.maintain(&format!("create database \"{name}\" template \"{template}\"")).await?;
        Ok(self.database(&name))
    }

    async fn template(&self, home: Home) -> Result<String, Failure> {
        let name = format!("template_{home:?}").to_lowercase();
        let mut installed = self.installed.lock().await;
        if installed.insert(home) {
            self.maintain(&format!("create database \"{name}\"")).await?;
            let database = self.database(&name);
            let mut installer = Child::start(home.installer(), "install", &database.url, 0).await?;
            installer.send_line("go").await?;
            installer.figures().await?;
            installer.end().await?;
            let mut connection = database.connect().await?;
            sqlx::query(include_str!("../sql/tasks.sql")).execute(&mut connection).await?;
            connection.close().await?;
        }
        Ok(name)
    }

    fn database(&self, name: &str) -> Database {
        Database { url: self.cluster.url(name), options: self.cluster.options(name) }
    }

    async fn maintain(&self, sql: &str) -> Result<(), Failure> {
        let mut connection = PgConnection::connect_with(&self.cluster.options("postgres")).await?;
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await?;
        Ok(connection.close().await?)
    }
}

impl Database {
    pub(crate) async fn connect(&self) -> Result<PgConnection, Failure> {
        Ok(PgConnection::connect_with(&self.options).await?)
    }

    pub(crate) async fn fill(&self, jobs: &Jobs) -> Result<(), Failure> {
        let mut connection = self.connect().await?;
        sqlx::query(include_str!("../sql/fill.sql"))
            .bind(jobs.task)
            .bind(i32::try_from(jobs.count)?)
            .bind(jobs.due_in_seconds)
            .bind(jobs.priority)
            .bind(jobs.attempts)
            .bind(i32::try_from(jobs.queues)?)
            .bind(i32::try_from(jobs.bytes)?)
            .bind(jobs.flag)
            .bind(i32::try_from(jobs.tasks)?)
            .execute(&mut connection)
            .await?;
        Ok(connection.close().await?)
    }

    /// Vacuums, analyzes and checkpoints, so that the run does not pay for filling the table.
    pub(crate) async fn settle(&self) -> Result<(), Failure> {
        self.run("vacuum analyze").await?;
        self.run("checkpoint").await
    }

    pub(crate) async fn run(&self, sql: &'static str) -> Result<(), Failure> {
        let mut connection = self.connect().await?;
        sqlx::raw_sql(sql).execute(&mut connection).await?;
        Ok(connection.close().await?)
    }

    pub(crate) async fn count(&self, sql: &'static str) -> Result<u64, Failure> {
        let mut connection = self.connect().await?;
        let count: i64 = sqlx::query_scalar(sql).fetch_one(&mut connection).await?;
        connection.close().await?;
        Ok(u64::try_from(count)?)
    }

    pub(crate) async fn jobs_left(&self) -> Result<u64, Failure> {
        self.count("select count(*) from graphile_worker._private_jobs").await
    }
}
