//! Where the statements of the utilities run: on the application's pool, or on its own connection or transaction.

use super::{Parameter, Statement, bound, rows, session};
use crate::error::{Context, Error};
use crate::job::Job;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Row};
use tokio::sync::Mutex;

/// Runs the statements of [`WorkerUtils`](crate::WorkerUtils): a [`PgPool`], or a connection or transaction of the
/// application ([`WithinSqlx`]).
pub trait UtilsExecutor: sealed::Executor {}

impl<E: sealed::Executor> UtilsExecutor for E {}

pub(crate) mod sealed {
    use super::{Error, Job, Parameter, PgPool, Statement};
    use std::future::Future;

    /// A row of a driver.
    pub trait DriverRow {
        fn is_empty(&self) -> bool;

        fn job(&self, context: &dyn Fn() -> String) -> Result<Job, Error>;

        /// The integer in a column.
        fn integer(&self, column: &str, context: &dyn Fn() -> String) -> Result<i64, Error>;

        /// The integers in a column that is an array.
        fn integers(&self, column: &str, context: &dyn Fn() -> String) -> Result<Vec<i64>, Error>;

        /// The text in a column that may be null.
        fn optional_text(&self, column: &str, context: &dyn Fn() -> String) -> Result<Option<String>, Error>;

        /// Its column `number`.
        fn number(&self, context: &dyn Fn() -> String) -> Result<i64, Error> {
            self.integer("number", context)
        }
    }

    #[allow(private_interfaces)]
    pub trait Executor: Send + Sync {
        type Row: DriverRow;

        fn fetch_all(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            context: &(dyn Fn() -> String + Send + Sync),
        ) -> impl Future<Output = Result<Vec<Self::Row>, Error>> + Send;

        /// The pool, if adds that arrive at the same moment may share a commit.
        fn pool(&self) -> Option<&PgPool> {
            None
        }

        fn jobs(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            context: impl Fn() -> String + Send + Sync,
        ) -> impl Future<Output = Result<Vec<Job>, Error>> + Send {
            async move {
                let rows = self.fetch_all(statement, parameters, &context).await?;
                rows.iter().filter(|row| !row.is_empty()).map(|row| row.job(&context)).collect()
            }
        }

        /// For a statement whose rows have one column `number`.
        fn numbers(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            context: impl Fn() -> String + Send + Sync,
        ) -> impl Future<Output = Result<Vec<i64>, Error>> + Send {
            async move {
                let rows = self.fetch_all(statement, parameters, &context).await?;
                rows.iter().map(|row| row.number(&context)).collect()
            }
        }
    }
}

impl sealed::DriverRow for PgRow {
    fn is_empty(&self) -> bool {
        Row::is_empty(self)
    }

    fn job(&self, context: &dyn Fn() -> String) -> Result<Job, Error> {
        rows::job(self).context(context)
    }

    fn integer(&self, column: &str, context: &dyn Fn() -> String) -> Result<i64, Error> {
        self.try_get(column).context(context)
    }

    fn integers(&self, column: &str, context: &dyn Fn() -> String) -> Result<Vec<i64>, Error> {
        self.try_get(column).context(context)
    }

    fn optional_text(&self, column: &str, context: &dyn Fn() -> String) -> Result<Option<String>, Error> {
        rows::optional_text(self, column).context(context)
    }
}

#[allow(private_interfaces)]
impl sealed::Executor for PgPool {
    type Row = PgRow;

    async fn fetch_all(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: &(dyn Fn() -> String + Send + Sync),
    ) -> Result<Vec<PgRow>, Error> {
        session::fetch_all(self, statement.is_pooled, bound(statement, parameters)).await.context(context)
    }

    fn pool(&self) -> Option<&PgPool> {
        Some(self)
    }
}

/// A connection or transaction of the application, for [`WorkerUtils::within`](crate::WorkerUtils::within).
#[derive(Debug)]
pub struct WithinSqlx<'c>(Mutex<&'c mut PgConnection>);

impl<'c> WithinSqlx<'c> {
    pub(crate) fn new(connection: &'c mut PgConnection) -> WithinSqlx<'c> {
        WithinSqlx(Mutex::new(connection))
    }
}

#[allow(private_interfaces)]
impl sealed::Executor for WithinSqlx<'_> {
    type Row = PgRow;

    async fn fetch_all(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: &(dyn Fn() -> String + Send + Sync),
    ) -> Result<Vec<PgRow>, Error> {
        bound(statement, parameters).fetch_all(&mut **self.0.lock().await).await.context(context)
    }
}
