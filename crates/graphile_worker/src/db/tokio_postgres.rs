//! Adding and administering jobs in a transaction of tokio-postgres: the same statements through another
//! driver.

use crate::Error;
use crate::db::executor::sealed;
use crate::db::rows::{JobColumns, Text, job_from_row};
use crate::db::{Parameter, Statement};
use crate::job::Job;
use serde_json::value::RawValue;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};

/// A client or transaction of the application, for
/// [`WorkerUtils::within_tokio_postgres`](crate::WorkerUtils::within_tokio_postgres).
pub struct WithinTokioPostgres<'c, C>(pub(crate) &'c C);

impl<C> std::fmt::Debug for WithinTokioPostgres<'_, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WithinTokioPostgres")
    }
}

#[allow(private_interfaces)]
impl<C: GenericClient + Sync> sealed::Executor for WithinTokioPostgres<'_, C> {
    type Row = Row;

    async fn fetch_all(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: &(dyn Fn() -> String + Send + Sync),
    ) -> Result<Vec<Row>, Error> {
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> = parameters.iter().map(value).collect();
        let rows = self.0.query_typed(statement.text(), &parameters).await;
        rows.map_err(|source| Error::TokioPostgres { context: context(), source })
    }
}

impl sealed::DriverRow for Row {
    fn is_empty(&self) -> bool {
        Row::is_empty(self)
    }

    fn job(&self, context: &dyn Fn() -> String) -> Result<Job, Error> {
        job(self).map_err(|failure| match failure {
            Failure::Driver(source) => Error::TokioPostgres { context: context(), source },
            Failure::Json(source) => Error::Database { context: context(), source: sqlx::Error::Decode(source.into()) },
        })
    }

    fn integer(&self, column: &str, context: &dyn Fn() -> String) -> Result<i64, Error> {
        self.try_get(column).map_err(|source| Error::TokioPostgres { context: context(), source })
    }

    fn integers(&self, column: &str, context: &dyn Fn() -> String) -> Result<Vec<i64>, Error> {
        self.try_get(column).map_err(|source| Error::TokioPostgres { context: context(), source })
    }

    fn optional_text(&self, column: &str, context: &dyn Fn() -> String) -> Result<Option<String>, Error> {
        let text = self.try_get(column).map(|text: Option<Text>| text.map(|Text { text, .. }| text));
        text.map_err(|source| Error::TokioPostgres { context: context(), source })
    }
}

enum Failure {
    Driver(tokio_postgres::Error),
    Json(serde_json::Error),
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Failure {
        Failure::Driver(error)
    }
}

fn job(row: &Row) -> Result<Job, Failure> {
    let Text { text: identifier, .. } = row.try_get("task_identifier")?;
    job_from_row!(row.try_get, JobColumns::NAMES, identifier.into(), Failure::Json)
}

/// With its type, the statement needs no name and is sent in one message: one round trip, and no state for a
/// pooler to lose.
fn value(parameter: &Parameter) -> (&(dyn ToSql + Sync), Type) {
    match parameter {
        Parameter::Text(value) => (value, Type::TEXT),
        Parameter::Time(value) => (value, Type::TIMESTAMPTZ),
        Parameter::Int(value) => (value, Type::INT4),
        Parameter::Bool(value) => (value, Type::BOOL),
        Parameter::Float(value) => (value, Type::FLOAT8),
        Parameter::Ids(value) => (value, Type::INT8_ARRAY),
        Parameter::Ints(value) => (value, Type::INT4_ARRAY),
        Parameter::TextArray(value) => (value, Type::TEXT_ARRAY),
        Parameter::Texts(value) => (value, Type::TEXT_ARRAY),
        Parameter::Times(value) => (value, Type::TIMESTAMPTZ_ARRAY),
        Parameter::Shorts(value) => (value, Type::INT2_ARRAY),
    }
}
