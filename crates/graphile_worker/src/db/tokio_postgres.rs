//! Adding and administering jobs in a transaction of tokio-postgres: the same statements through another
//! driver.

use crate::Error;
use crate::db::rows::job_from_row;
use crate::db::source::sealed;
use crate::db::{Parameter, Statement};
use crate::job::Job;
use serde_json::value::RawValue;
use std::sync::Arc;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};

/// A client or transaction of the application.
pub struct WithinTokioPostgres<'c, C>(pub(crate) &'c C);

impl<C> std::fmt::Debug for WithinTokioPostgres<'_, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WithinTokioPostgres")
    }
}

impl<C: GenericClient + Sync> sealed::Source for WithinTokioPostgres<'_, C> {
    #[allow(private_interfaces)]
    async fn jobs(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<Job>, Error> {
        let failed = |source| Error::TokioPostgres { context: context(), source };
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> = parameters.iter().map(value).collect();
        let rows = self.0.query_typed(statement.text(), &parameters).await.map_err(failed)?;
        rows.iter().filter(|row| !row.is_empty()).map(job).collect::<Result<_, Failure>>().map_err(|failure| {
            match failure {
                Failure::Driver(source) => failed(source),
                Failure::Json(source) => {
                    Error::Database { context: context(), source: sqlx::Error::Decode(source.into()) }
                }
            }
        })
    }

    #[allow(private_interfaces)]
    async fn numbers(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        context: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<i64>, Error> {
        let failed = |source| Error::TokioPostgres { context: context(), source };
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> = parameters.iter().map(value).collect();
        let rows = self.0.query_typed(statement.text(), &parameters).await.map_err(failed)?;
        rows.iter().map(|row| row.try_get("number")).collect::<Result<_, _>>().map_err(failed)
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
    let named_in_the_row: Option<Arc<str>> = None;
    job_from_row!(row, named_in_the_row, Failure::Json)
}

/// With its type, the statement needs no name and is sent in one message: one round trip, and no state for a
/// pooler to lose.
fn value(parameter: &Parameter) -> (&(dyn ToSql + Sync), Type) {
    match parameter {
        Parameter::Text(value) => (value, Type::TEXT),
        Parameter::Time(value) => (value, Type::TIMESTAMPTZ),
        Parameter::Int(value) => (value, Type::INT4),
        Parameter::Bool(value) => (value, Type::BOOL),
        Parameter::Ids(value) => (value, Type::INT8_ARRAY),
        Parameter::Ints(value) => (value, Type::INT4_ARRAY),
        Parameter::TextArray(value) => (value, Type::TEXT_ARRAY),
        Parameter::Texts(value) => (value, Type::TEXT_ARRAY),
        Parameter::Times(value) => (value, Type::TIMESTAMPTZ_ARRAY),
        Parameter::Shorts(value) => (value, Type::INT2_ARRAY),
    }
}
