//! A private PostgreSQL in a folder: for development, and for tests that each need a real database.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use graphile_worker_devdb::Cluster;
//!
//! let cluster = Cluster::open("./.graphile-worker")?;
//! println!("psql {}", cluster.url("postgres"));
//! // The server runs as long as a process has a handle to it.
//! std::io::stdin().read_line(&mut String::new())?;
//! # Ok(()) }
//! ```
//!
//! In a test, [`Cluster::for_tests`] opens the cluster that all test processes of this user share, and
//! [`Cluster::database`] gives each test a copy of a template that is installed once:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use graphile_worker_devdb::Cluster;
//! use sqlx::Connection;
//!
//! let cluster = Cluster::for_tests()?;
//! let database = cluster
//!     .database("my-app v1", async |options| {
//!         let mut connection = sqlx::PgConnection::connect_with(&options).await?;
//!         sqlx::raw_sql("create table users (id int primary key)").execute(&mut connection).await?;
//!         Ok(())
//!     })
//!     .await?;
//! let pool = sqlx::PgPool::connect_with(database.options()).await?;
//! # Ok(()) }
//! ```
//!
//! The examples use `tokio` and `sqlx` 0.9 with its features `postgres` and `runtime-tokio`.
//!
//! It runs an installed PostgreSQL ([`Programs::find`]) and downloads nothing. It requires Unix.
//!
//! Why not an existing crate (as of their source code): `pg-embed` 1.0 always downloads its binaries;
//! `postgresql_embedded` 0.22 can use an installation, but does not drop root privileges; `pgtemp` 0.7 finds
//! an installation and drops them, but starts a server for each database. None of them shares a running
//! cluster between test processes behind a lock, creates databases from a template, or stops the server when
//! its last owner was killed.

mod cluster;
mod database;
mod error;
mod pgbouncer;
mod programs;
mod standby;

pub use cluster::{Cluster, ClusterOptions};
pub use database::TestDatabase;
pub use error::Error;
pub use pgbouncer::PgBouncer;
pub use programs::Programs;
