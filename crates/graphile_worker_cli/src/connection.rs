//! Which database a command works on, and how to connect to it. No message or log line from here contains a password.
//! `arguments` declares the options and `settings` reads the configuration file; connection strings are parsed by the
//! library.

use crate::dev;
use crate::failure::Failure;
use graphile_worker::{DatabaseConfig, Error, WorkerUtils};
use graphile_worker_devdb::Cluster;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use std::os::unix::process::CommandExt;
use std::process::Stdio;

const AFTER_C: &str = "the connection string after -c";

/// The database that a command works on, and the schema in it. It is not connected yet.
#[derive(Debug, Clone)]
pub(crate) struct Database {
    config: DatabaseConfig,
    password_command: Option<String>,
    schema: String,
}

impl Database {
    /// The first of: `-c`, `DATABASE_URL`, the PG variables, the configuration file, the application's options, and a
    /// `dev` that is running in the current folder.
    pub(crate) fn find(
        flag: Option<&str>,
        file: Option<&str>,
        application: Option<Result<DatabaseConfig, Error>>,
        schema: &str,
    ) -> Result<Database, Failure> {
        let from_environment = std::env::var("DATABASE_URL").ok().filter(|url| !url.is_empty());
        let config = match (flag, from_environment, DatabaseConfig::from_env(), file) {
            (Some(text), _, _, _) => parse(AFTER_C, text)?,
            (None, Some(text), _, _) => parse("DATABASE_URL", &text)?,
            (None, None, Some(config), _) => check("the connection of the PG variables", config)?,
            (None, None, None, Some(text)) => parse("the connection in the configuration file", text)?,
            (None, None, None, None) => match (application, Cluster::url_if_running(dev::FOLDER, "postgres")) {
                (Some(config), _) => check("the connection of the application", config)?,
                (None, Some(url)) => parse("the connection of `dev`", &url)?,
                (None, None) => {
                    let mut message = "no database given: use -c URL, or set DATABASE_URL or PGDATABASE".to_owned();
                    if let Some(file) = crate::run::node_config_files().next() {
                        message.push_str(&format!(
                            "; {file} configures Node's worker and is not read: pass its connectionString with -c"
                        ));
                    }
                    return Err(Failure::Usage(message));
                }
            },
        };
        Ok(Database::new(config, schema))
    }

    pub(crate) fn new(config: impl Into<DatabaseConfig>, schema: &str) -> Database {
        let config = config.into().named("graphile-worker");
        Database { config, password_command: None, schema: schema.to_owned() }
    }

    /// Runs this command to get the password of each new connection.
    pub(crate) fn with_password_command(mut self, command: Option<String>) -> Database {
        self.config = with_password_from(self.config, command.as_ref());
        self.password_command = command;
        self
    }

    /// How to connect without the pooler, with the password command if there is one.
    pub(crate) fn direct(&self, text: &str) -> Result<DatabaseConfig, Failure> {
        Ok(with_password_from(direct(text)?, self.password_command.as_ref()))
    }

    /// The schema of Graphile Worker.
    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    pub(crate) fn config(&self) -> DatabaseConfig {
        self.config.clone()
    }

    /// Host and port, or the socket, for messages.
    pub(crate) fn server(&self) -> String {
        self.config.server()
    }

    /// Opens one connection. Through a pooler, use it only for statements without parameters and for `migrate`.
    pub(crate) async fn connect(&self) -> Result<PgConnection, Failure> {
        let mut connection = self.config.connect().await?;
        let allowed = graphile_worker::allow_invalid_utf8(&mut connection).await;
        allowed.map_err(|source| Error::database(format!("connect to {}", self.server()), source))?;
        Ok(connection)
    }

    /// Opens a pool with one connection, so that a connection error shows up here.
    pub(crate) async fn pool(&self, max_connections: u32) -> Result<PgPool, Failure> {
        let pool = PgPoolOptions::new()
            .max_connections(max_connections)
            .after_connect(|connection, _| Box::pin(graphile_worker::allow_invalid_utf8(connection)));
        Ok(self.config.pool(pool).await?)
    }

    /// Utilities on a pool of `max_connections`. They use no prepared statements: a command runs each statement too
    /// rarely to gain from them, and they would not work through a pooler.
    pub(crate) async fn utils(&self, max_connections: u32) -> Result<WorkerUtils, Failure> {
        let pool = self.pool(max_connections).await?;
        Ok(WorkerUtils::new(pool, &self.schema).with_prepared_statements(false))
    }
}

fn with_password_from(config: DatabaseConfig, command: Option<&String>) -> DatabaseConfig {
    match command.cloned() {
        Some(command) => config.password_provider(move || password_from(command.clone())),
        None => config,
    }
}

/// Runs the command and returns the password that it prints. An error includes the last line of its standard error.
async fn password_from(command: String) -> Result<String, String> {
    let mut shell = tokio::process::Command::new("/bin/sh");
    shell.arg("-c").arg(&command).stdin(Stdio::null()).kill_on_drop(true);
    let output = shell.output().await.map_err(|error| format!("could not start the password command: {error}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stderr = stderr.trim().lines().next_back().map(|line| format!(": {line}")).unwrap_or_default();
    if !output.status.success() {
        return Err(format!("the password command failed ({}){stderr}", output.status));
    }
    let password =
        String::from_utf8(output.stdout).map_err(|_| "the password command did not print UTF-8".to_owned())?;
    let password = password.trim_end_matches(['\n', '\r']);
    if password.is_empty() || password.contains('\n') {
        let printed = if password.is_empty() { "nothing" } else { "several lines" };
        return Err(format!("the password command printed {printed}, expected one line{stderr}"));
    }
    Ok(password.to_owned())
}

/// A connection without the pooler, and without the password command.
pub(crate) fn direct(text: &str) -> Result<DatabaseConfig, Failure> {
    parse("the direct connection", text)
}

/// Every user of the machine can read a password on the command line. If the connection string has one, restarts this
/// program with the string in the environment variable `variable` instead. Returns if there is nothing to hide.
pub(crate) fn hide_password(connection: &str, variable: &str) -> Result<(), Failure> {
    parse(AFTER_C, connection)?;
    if !DatabaseConfig::has_password(connection) {
        return Ok(());
    }
    let arguments: Option<Vec<String>> =
        std::env::args_os().skip(1).map(|argument| argument.into_string().ok()).collect();
    let Some(arguments) = arguments else { return Ok(()) };
    let program = std::env::current_exe().map_err(|error| format!("could not find this program: {error}"))?;
    let mut command = std::process::Command::new(program);
    command.args(without_connection(arguments, connection)).env(variable, connection);
    Err(Failure::because(format!("could not restart this program: {}", command.exec())))
}

/// The arguments without `-c` and its value, in all their spellings.
fn without_connection(arguments: Vec<String>, connection: &str) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    for argument in arguments {
        let Some(flags) = argument.strip_suffix(connection) else {
            kept.push(argument);
            continue;
        };
        let flags = if flags.is_empty() { kept.pop().unwrap_or_default() } else { flags.to_owned() };
        // `-wc URL` is `-w -c URL`.
        let others = flags.trim_end_matches('=').trim_end_matches('c');
        if !flags.starts_with("--") && others.len() > 1 {
            kept.push(others.to_owned());
        }
    }
    kept
}

/// Parses a connection string. An empty one is usually an unset shell variable.
fn parse(place: &str, text: &str) -> Result<DatabaseConfig, Failure> {
    if text.trim().is_empty() {
        return Err(Failure::Usage(format!("{place} is empty")));
    }
    check(place, DatabaseConfig::parse(text))
}

fn check(place: &str, config: Result<DatabaseConfig, Error>) -> Result<DatabaseConfig, Failure> {
    config.map_err(|error| match error {
        Error::InvalidConnection { problem, .. } => Failure::Usage(format!("{place} is invalid: {problem}")),
        other => other.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_password_and_its_option_leave_the_command_line() {
        let url = "postgres://u:p@h/d";
        for (arguments, kept) in [
            (&["-c", url, "--once"][..], &["--once"][..]),
            (&["--once", "--connection", url], &["--once"]),
            (&["--connection=postgres://u:p@h/d", "list"], &["list"]),
            (&["-cpostgres://u:p@h/d", "-j", "4"], &["-j", "4"]),
            (&["-c=postgres://u:p@h/d"], &[]),
            (&["-wc", url], &["-w"]),
        ] {
            let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            assert_eq!(without_connection(arguments, url), kept);
        }
    }

    #[test]
    fn invalid_connection_strings_are_not_quoted() {
        for text in ["http://user:secret@host/db", "postgres://user:secret@host:port/db", "user:secret@host", " "] {
            let Err(Failure::Usage(message)) = parse("DATABASE_URL", text) else { panic!("{text} was accepted") };
            assert!(message.starts_with("DATABASE_URL ") && !message.contains("secret"), "{message}");
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn password_command_must_print_exactly_one_line() {
        assert_eq!(password_from("echo 'a b '".to_owned()).await.as_deref(), Ok("a b "));
        for (command, problem) in [
            ("echo first >&2; echo no token >&2; exit 3", "the password command failed (exit status: 3): no token"),
            ("true", "the password command printed nothing, expected one line"),
            ("echo a; echo b", "the password command printed several lines, expected one line"),
        ] {
            assert_eq!(password_from(command.to_owned()).await.unwrap_err(), problem);
        }
    }
}
