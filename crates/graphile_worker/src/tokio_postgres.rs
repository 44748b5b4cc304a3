//! Adding and administering jobs inside a transaction of tokio-postgres.

use crate::Error;
use crate::db::{Parameter, Statement, job_from_row};
use crate::job::Job;
use crate::worker_utils::sealed;
use serde_json::value::RawValue;
use std::sync::Arc;
use tokio_postgres::types::ToSql;
use tokio_postgres::{GenericClient, Row};

/// A client, or transaction, of the application's.
pub struct WithinTokioPostgres<'c, C>(pub(crate) &'c C);

impl<C: GenericClient + Sync> sealed::Source for WithinTokioPostgres<'_, C> {
    #[allow(private_interfaces)]
    async fn jobs(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        doing: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<Job>, Error> {
        let failed = |source| Error::TokioPostgres { doing: doing(), source };
        let parameters: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(value).collect();
        let rows = self.0.query(statement.text(), &parameters).await.map_err(failed)?;
        rows.iter().filter(|row| !row.is_empty()).map(job).collect::<Result<_, Failure>>().map_err(|failure| {
            match failure {
                Failure::Driver(source) => failed(source),
                Failure::Json(source) => Error::Database { doing: doing(), source: sqlx::Error::Decode(source.into()) },
            }
        })
    }

    #[allow(private_interfaces)]
    async fn numbers(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        doing: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<i64>, Error> {
        let failed = |source| Error::TokioPostgres { doing: doing(), source };
        let parameters: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(value).collect();
        let rows = self.0.query(statement.text(), &parameters).await.map_err(failed)?;
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

fn value(parameter: &Parameter) -> &(dyn ToSql + Sync) {
    match parameter {
        Parameter::Text(value) => value,
        Parameter::Time(value) => value,
        Parameter::Int(value) => value,
        Parameter::Bool(value) => value,
        Parameter::Ids(value) => value,
        Parameter::Ints(value) => value,
        Parameter::TextArray(value) => value,
        Parameter::Texts(value) => value,
        Parameter::Times(value) => value,
        Parameter::Shorts(value) => value,
    }
}
