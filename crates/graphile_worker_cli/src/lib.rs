//! The command line `graphile-worker`: what it accepts, what it prints, how it exits.
//!
//! One line on standard output where it succeeds, one on standard error where it fails. Exit codes:
//! 0 done, 1 failed, 2 wrong usage. A password is never printed.

use clap::Parser;
use clap::error::ErrorKind;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection};
use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

/// A server that does not answer at all is reported, not waited for.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// A job queue on the PostgreSQL you already have.
#[derive(Debug, Parser)]
#[command(name = "graphile-worker", version)]
struct Arguments {
    /// Database connection string, such as postgres://user:password@host:5432/database
    #[arg(short, long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    connection: Option<String>,

    /// The database schema in which Graphile Worker is (to be) located
    #[arg(short, long, default_value = "graphile_worker")]
    schema: String,

    /// Just install (or update) the database schema, then exit
    #[arg(long)]
    schema_only: bool,
}

/// Why the program ends without having done its work.
enum Failure {
    /// Asked for something it cannot do.
    Usage(String),
    /// Tried and failed.
    Failed(Box<dyn Error>),
}

impl<E: Into<Box<dyn Error>>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Failed(error.into())
    }
}

/// Runs the command line of this process and says how it ended.
pub async fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            print!("{error}");
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(Failure::Usage(first_line(&error))),
    };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,sqlx=error")),
        )
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .try_init();
    match install_schema(arguments).await {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => fail(failure),
    }
}

async fn install_schema(arguments: Arguments) -> Result<String, Failure> {
    let Some(url) = arguments.connection else {
        return Err(Failure::Usage("no database given: use -c URL or set DATABASE_URL".to_owned()));
    };
    if !arguments.schema_only {
        return Err(Failure::Usage("this release can only install the schema: add --schema-only".to_owned()));
    }
    let options = parse_url(&url)?.application_name("graphile-worker");
    let server = format!("{}:{}", options.get_host(), options.get_port());
    let mut connection = tokio::time::timeout(CONNECT_TIMEOUT, options.connect())
        .await
        .map_err(|_| format!("could not connect to {server}: no answer in {} seconds", CONNECT_TIMEOUT.as_secs()))?
        .map_err(|error| format!("could not connect to {server}: {}", explain(&error)))?;
    let migration = graphile_worker::migrate(&mut connection, &arguments.schema).await?;
    let database: String = sqlx::query_scalar("select current_database()::text").fetch_one(&mut connection).await?;
    let _ = connection.close().await;
    Ok(format!("{migration}, in the database {database:?} on {server}"))
}

/// The parser's own message may quote the password, so ours says nothing of what it found.
fn parse_url(url: &str) -> Result<PgConnectOptions, Failure> {
    let scheme_is_ours = url.starts_with("postgres://") || url.starts_with("postgresql://");
    let parsed = if scheme_is_ours { url.parse().ok() } else { None };
    parsed.ok_or_else(|| {
        Failure::Usage(
            "the connection string is not a URL such as postgres://user:password@host:5432/database, with special \
             characters in the password percent-encoded"
                .to_owned(),
        )
    })
}

fn fail(failure: Failure) -> ExitCode {
    match failure {
        Failure::Usage(message) => {
            eprintln!("graphile-worker: {message} (see --help)");
            ExitCode::from(2)
        }
        Failure::Failed(error) => {
            eprintln!("graphile-worker: {}", explain(error.as_ref()));
            ExitCode::from(1)
        }
    }
}

/// Clap explains at length; what comes before the usage says what is wrong, and often what was meant.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    if text.contains("://") {
        // It quotes what it found, and what it found has a password in it.
        return "there is a connection string where none was expected: it goes behind -c".to_owned();
    }
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let explanation: Vec<&str> =
        lines.filter(|line| !line.is_empty() && !line.starts_with("For more information")).collect();
    explanation.join(" ").trim_start_matches("error: ").to_owned()
}

/// An error with its sources, in one line. Of what the server said, its message, detail and hint.
fn explain(error: &(dyn Error + 'static)) -> String {
    if let Some(sqlx::Error::Database(database)) = error.downcast_ref::<sqlx::Error>() {
        let error = database.downcast_ref::<sqlx::postgres::PgDatabaseError>();
        let parts = [Some(error.message()), error.detail(), error.hint()];
        return parts.into_iter().flatten().map(|part| part.replace('\n', " ")).collect::<Vec<_>>().join(": ");
    }
    let message = error.to_string().replace('\n', " ");
    match error.source() {
        // Some errors already print what they wrap.
        Some(source) if !message.ends_with(&source.to_string()) => format!("{message}: {}", explain(source)),
        _ => message,
    }
}
