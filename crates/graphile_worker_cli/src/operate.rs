//! The operator's commands: what they are called, which one does what, and what it means when the database refuses.

mod change;
mod doctor;
mod install;
mod look;
mod top;

use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print_line;
use clap::{Args, Subcommand};
use graphile_worker::WorkerUtils;
use serde::Serialize;

pub(crate) use install::migrate;

/// Looks at jobs, or changes them.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Add a job, or all jobs of a file
    Add(change::Add),
    /// List jobs
    List(look::List),
    /// Show all that is known of a job, its payload included
    Show(look::Show),
    /// Explain why a job is not running
    Why(look::Why),
    /// Delete jobs that are not running, as if they were done
    Complete(change::Complete),
    /// Fail jobs that are not running, for good
    Fail(change::Fail),
    /// Change when and how jobs are run that are not running
    Reschedule(change::Reschedule),
    /// Run jobs as soon as possible; those that had failed for good have all their attempts again
    RunNow(change::RunNow),
    /// Remove jobs by their keys
    Remove(change::Remove),
    /// Count jobs by state and task
    Stats(look::Stats),
    /// List queues: what waits, and who holds them
    Queues(look::Queues),
    /// List workers: who lives, and what they hold
    Workers(look::Workers),
    /// Watch the queue at work: rates, depth, lag
    Top(top::Top),
    /// Free the jobs of workers that have died
    Sweep(change::Sweep),
    /// Free what workers hold that are known to be dead, such as Node's
    Unlock(change::Unlock),
    /// Delete what is not needed any more
    Cleanup(change::Cleanup),
    /// Look whether all is well: server, schema, rights, tables, lag; exit code 1 if there is a problem
    Doctor(doctor::Doctor),
    /// Install the database schema, or bring it up to date
    Migrate(install::Migrate),
    /// Say what dropping the schema would take away; with --yes, drop it
    Uninstall(install::Uninstall),
}

/// How the answer is given.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Form {
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Does it.
pub(crate) async fn run(command: Command, database: &Database) -> Result<(), Failure> {
    let done = match command {
        Command::Add(asked) => change::add(asked, database).await,
        Command::List(asked) => look::list(asked, database).await,
        Command::Show(asked) => look::show(asked, database).await,
        Command::Why(asked) => look::why(asked, database).await,
        Command::Complete(asked) => change::complete(asked, database).await,
        Command::Fail(asked) => change::fail(asked, database).await,
        Command::Reschedule(asked) => change::reschedule(asked, database).await,
        Command::RunNow(asked) => change::run_now(asked, database).await,
        Command::Remove(asked) => change::remove(asked, database).await,
        Command::Stats(asked) => look::stats(asked, database).await,
        Command::Queues(asked) => look::queues(asked, database).await,
        Command::Workers(asked) => look::workers(asked, database).await,
        Command::Top(asked) => top::top(asked, database).await,
        Command::Sweep(asked) => change::sweep(asked, database).await,
        Command::Unlock(asked) => change::unlock(asked, database).await,
        Command::Cleanup(asked) => change::cleanup(asked, database).await,
        Command::Doctor(asked) => doctor::doctor(asked, database).await,
        Command::Migrate(asked) => install::run_migrate(asked, database).await,
        Command::Uninstall(asked) => install::uninstall(asked, database).await,
    };
    done.map_err(|failure| understood(failure, database))
}

/// The utilities for a schema that is there and whose rows this role sees: an empty list would not tell.
async fn utils(database: &Database) -> Result<WorkerUtils, Failure> {
    let pool = database.pool(2).await?;
    let hides_rows: Option<bool> = sqlx::query_scalar(
        "select row_security_active(jobs) from to_regclass(format('%I._private_jobs', $1::text)) as jobs
         where jobs is not null",
    )
    .bind(database.schema())
    .fetch_optional(&pool)
    .await?;
    match hides_rows {
        None => Err(not_installed(database)),
        Some(true) => Err(Failure::because(format!(
            "row security hides the jobs of the schema {:?} from this role: connect as the owner of the schema",
            database.schema()
        ))),
        Some(false) => {
            let utils = WorkerUtils::new(pool, database.schema());
            // A schema that is too new for us is not for us to work with. One that lacks something of ours does for most.
            utils.is_migrated().await?;
            Ok(utils)
        }
    }
}

fn not_installed(database: &Database) -> Failure {
    Failure::because(format!(
        "Graphile Worker is not installed in the schema {:?} on {}, or by an older release: run `{} migrate`, or name the right schema with -s",
        database.schema(),
        database.server(),
        program(database.schema())
    ))
}

/// How the program is called for this schema.
pub(crate) fn program(schema: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match schema {
        "graphile_worker" => "graphile-worker".to_owned(),
        plain if plain.chars().all(is_plain) => format!("graphile-worker -s {plain}"),
        odd => format!("graphile-worker -s '{}'", odd.replace('\'', "'\\''")),
    }
}

/// What a refusal of the server means to somebody who operates a queue.
fn understood(failure: Failure, database: &Database) -> Failure {
    let Failure::Failed(error) = &failure else { return failure };
    let code = match (error.downcast_ref::<graphile_worker::Error>(), error.downcast_ref::<sqlx::Error>()) {
        (Some(graphile_worker::Error::Database { source, .. }), _) => code(source),
        (_, Some(source)) => code(source),
        _ => None,
    };
    match code.as_deref() {
        // No such schema, table, function, column.
        Some("3F000" | "42P01" | "42883" | "42703") => not_installed(database),
        Some("42501") => Failure::because(format!(
            "{}: `graphile-worker doctor` says which rights this role lacks",
            crate::failure::explain(error.as_ref())
        )),
        _ => failure,
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned())
}

fn print_json(answer: &impl Serialize) -> Result<(), Failure> {
    print_line(&serde_json::to_string(answer)?)
}

/// So many of something.
fn counted(number: impl TryInto<i64>, one: &str, many: &str) -> String {
    match number.try_into().unwrap_or(i64::MAX) {
        1 => format!("1 {one}"),
        number => format!("{number} {many}"),
    }
}
