//! The operators' commands: their names, their dispatch, and advice for errors of the database.
//! The commands themselves are in the files of the folder `operate`; the library does the work.

mod doctor;
mod grant;
mod inspect;
mod install;
mod limits;
mod modify;
mod top;

use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print_line;
use clap::{Args, Subcommand};
use graphile_worker::{WorkerUtils, program};
use serde::Serialize;

pub(crate) use install::migrate;

/// The operators' commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Add a job, or all jobs in a file
    Add(modify::Add),
    /// List jobs
    List(inspect::List),
    /// Show a job with all its details, including the payload
    Show(inspect::Show),
    /// Explain why a job is not running
    Why(inspect::Why),
    /// Complete jobs that are not running: delete them as if they had succeeded
    Complete(modify::Complete),
    /// Fail jobs that are not running, permanently
    Fail(modify::Fail),
    /// Cancel jobs: waiting ones at once; running ones are asked to stop, and are not retried
    Cancel(modify::Cancel),
    /// Change the time, priority or attempts of jobs that are not running
    Reschedule(modify::Reschedule),
    /// Run jobs as soon as possible; permanently failed jobs get all their attempts back
    RunNow(modify::RunNow),
    /// Remove jobs by job key
    Remove(modify::Remove),
    /// Count jobs by state and task
    Stats(inspect::Stats),
    /// List queues: waiting jobs, and the workers that hold them
    Queues(inspect::Queues),
    /// List workers: state, heartbeat, and the jobs they hold
    Workers(inspect::Workers),
    /// Watch the queue live: rates, depth, lag
    Top(top::Top),
    /// Limit how many jobs run at the same time or start in a period, in all workers, and set circuit breakers
    #[command(subcommand)]
    Limit(limits::LimitCommand),
    /// Start no more jobs of a task, a queue, a group, or at all
    Pause(limits::Pause),
    /// End a pause, reopen a limit that a rate-limited job has closed, or reset a tripped breaker
    Resume(limits::Resume),
    /// Release the jobs of dead workers
    Sweep(modify::Sweep),
    /// Release the jobs and queues of a worker that you know is dead, such as one of Node's
    Unlock(modify::Unlock),
    /// Delete tasks without jobs, queues without jobs, or permanently failed jobs
    Cleanup(modify::Cleanup),
    /// Check server, schema, rights, tables and lag; exit code 1 if there is a problem
    Doctor(doctor::Doctor),
    /// Print the SQL that lets a role add, run or read jobs; with --apply, run it
    Grant(grant::Grant),
    /// Install or update the database schema
    Migrate(install::Migrate),
    /// Show what dropping the schema would delete; with --yes, drop it
    Uninstall(install::Uninstall),
}

/// How the result is printed.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct OutputFormat {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) async fn run(command: Command, database: &Database) -> Result<(), Failure> {
    let result = match command {
        Command::Add(args) => modify::add(args, database).await,
        Command::List(args) => inspect::list(args, database).await,
        Command::Show(args) => inspect::show(args, database).await,
        Command::Why(args) => inspect::why(args, database).await,
        Command::Complete(args) => modify::complete(args, database).await,
        Command::Fail(args) => modify::fail(args, database).await,
        Command::Cancel(args) => modify::cancel(args, database).await,
        Command::Reschedule(args) => modify::reschedule(args, database).await,
        Command::RunNow(args) => modify::run_now(args, database).await,
        Command::Remove(args) => modify::remove(args, database).await,
        Command::Stats(args) => inspect::stats(args, database).await,
        Command::Queues(args) => inspect::queues(args, database).await,
        Command::Workers(args) => inspect::workers(args, database).await,
        Command::Top(args) => top::top(args, database).await,
        Command::Limit(command) => limits::limit(command, database).await,
        Command::Pause(args) => limits::pause(args, database).await,
        Command::Resume(args) => limits::resume(args, database).await,
        Command::Sweep(args) => modify::sweep(args, database).await,
        Command::Unlock(args) => modify::unlock(args, database).await,
        Command::Cleanup(args) => modify::cleanup(args, database).await,
        Command::Doctor(args) => doctor::doctor(args, database).await,
        Command::Grant(args) => grant::grant(args, database).await,
        Command::Migrate(args) => install::run_migrate(args, database).await,
        Command::Uninstall(args) => install::uninstall(args, database).await,
    };
    result.map_err(|failure| with_advice(failure, database))
}

/// Utilities for an installed schema. Fails if row security hides the jobs: an empty list would look like no jobs.
async fn utils(database: &Database) -> Result<WorkerUtils, Failure> {
    utils_for(database, true).await
}

/// The same for adding jobs, which a role can do without seeing any.
async fn utils_for_adding(database: &Database) -> Result<WorkerUtils, Failure> {
    utils_for(database, false).await
}

async fn utils_for(database: &Database, reads_jobs: bool) -> Result<WorkerUtils, Failure> {
    let pool = database.pool(2).await?;
    // Whatever is on the role's or the database's own path.
    let mut transaction = pool.begin_with("begin; set local search_path = pg_catalog, pg_temp").await?;
    let hides_rows: Option<bool> = sqlx::query_scalar(
        "select row_security_active(jobs::oid) and not exists (
           select from pg_policy
           where polrelid = jobs::oid and polpermissive and polcmd in ('*'::\"char\", 'r'::\"char\")
             and exists (select from pg_catalog.unnest(polroles) as allowed where allowed = 0::oid or pg_has_role(allowed, 'usage'))
         )
         from to_regclass(pg_catalog.format('%I._private_jobs', $1::text)) as jobs
         where jobs is not null",
    )
    .persistent(false)
    .bind(database.schema())
    .fetch_optional(&mut *transaction)
    .await?;
    graphile_worker::commit_transaction(transaction).await?;
    match hides_rows {
        None => Err(not_installed(database)),
        Some(true) if reads_jobs => Err(Failure::because(format!(
            "row security hides the jobs of schema {:?} from this role: connect as the owner of the schema, \
             or ask the owner to run `{} grant ROLE --read --apply`",
            database.schema(),
            program(database.schema())
        ))),
        Some(_) => {
            let utils = WorkerUtils::new(pool, database.schema()).with_prepared_statements(false);
            // Fails if the schema is too new for this release. Most commands work even if it needs an update.
            utils.is_migrated().await?;
            Ok(utils)
        }
    }
}

fn not_installed(database: &Database) -> Failure {
    Failure::because(format!(
        "Graphile Worker is not installed in schema {:?} on {}, or needs an update: run `{} migrate`, or set the right \
         schema with -s",
        database.schema(),
        database.server(),
        program(database.schema())
    ))
}

/// Adds what to do about a missing schema or missing rights to an error of the server.
fn with_advice(failure: Failure, database: &Database) -> Failure {
    let Failure::Failed(error) = &failure else { return failure };
    let code = match (error.downcast_ref::<graphile_worker::Error>(), error.downcast_ref::<sqlx::Error>()) {
        (Some(graphile_worker::Error::Database { source, .. }), _) => code(source),
        (_, Some(source)) => code(source),
        _ => None,
    };
    match code.as_deref() {
        // Schema, table, function or column does not exist.
        Some("3F000" | "42P01" | "42883" | "42703") => not_installed(database),
        Some("42501") => Failure::because(format!(
            "{}: run `graphile-worker doctor` to see which rights this role lacks",
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

/// A number with its noun, singular or plural.
fn counted(number: impl TryInto<i64>, one: &str, many: &str) -> String {
    match number.try_into().unwrap_or(i64::MAX) {
        1 => format!("1 {one}"),
        number => format!("{number} {many}"),
    }
}
