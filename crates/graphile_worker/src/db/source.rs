//! Where the statements of the utilities run: the application's pool, or a connection or transaction of its own.

use super::session;
use super::{Parameter, Statement, bound, rows};
use crate::error::{Context, Error};
use crate::job::Job;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Row};
use tokio::sync::Mutex;

/// Where statements run: the application's pool, or [`Within`] its transaction.
pub trait Source: sealed::Source {}

impl<S: sealed::Source> Source for S {}

pub(crate) mod sealed {
    use super::{Error, Job, Parameter, PgPool, Statement};
    use std::future::Future;

    pub trait Source: Send + Sync {
        #[allow(private_interfaces)]
        fn jobs(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            context: impl Fn() -> String + Send + Sync,
        ) -> impl Future<Output = Result<Vec<Job>, Error>> + Send;

        /// For a statement whose rows have one column `number`.
        #[allow(private_interfaces)]
        fn numbers(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            context: impl Fn() -> String + Send + Sync,
        ) -> impl Future<Output = Result<Vec<i64>, Error>> + Send;

        /// The pool, if adds that arrive at the same moment may share a commit.
        fn pool(&self) -> Option<&PgPool> {
            None
        }
    }
}

impl sealed::Source for PgPool {
    #[allow(private_interfaces)]
    async fn jobs(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<Job>, Error> {
        read(session::fetch_all(self, statement.is_pooled, bound(statement, parameters)).await, context)
    }

    #[allow(private_interfaces)]
    async fn numbers(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<i64>, Error> {
        read_numbers(session::fetch_all(self, statement.is_pooled, bound(statement, parameters)).await, context)
    }

    fn pool(&self) -> Option<&PgPool> {
        Some(self)
    }
}

/// A connection or transaction of the application.
#[derive(Debug)]
pub struct Within<'c>(Mutex<&'c mut PgConnection>);

impl<'c> Within<'c> {
    pub(crate) fn new(connection: &'c mut PgConnection) -> Within<'c> {
        Within(Mutex::new(connection))
    }
}

impl sealed::Source for Within<'_> {
    #[allow(private_interfaces)]
    async fn jobs(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<Job>, Error> {
        read(bound(statement, parameters).fetch_all(&mut **self.0.lock().await).await, context)
    }

    #[allow(private_interfaces)]
    async fn numbers(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<i64>, Error> {
        read_numbers(bound(statement, parameters).fetch_all(&mut **self.0.lock().await).await, context)
    }
}

fn read_numbers(rows: sqlx::Result<Vec<PgRow>>, context: impl Fn() -> String) -> Result<Vec<i64>, Error> {
    let numbers = |rows: Vec<PgRow>| rows.iter().map(|row| row.try_get("number")).collect();
    rows.and_then(numbers).context(context)
}

fn read(rows: sqlx::Result<Vec<PgRow>>, context: impl Fn() -> String) -> Result<Vec<Job>, Error> {
    let rows = rows.context(&context)?;
    let jobs = rows.iter().filter(|row| !row.is_empty());
    jobs.map(|row| rows::job(row, None)).collect::<sqlx::Result<_>>().context(&context)
}
