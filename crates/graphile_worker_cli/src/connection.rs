//! Which database: found in the flags, the environment or the configuration file, reached within a time limit.
//! No message from here, and no log line, has a password in it.

use crate::dev;
use crate::failure::{Failure, explain};
use graphile_worker_devdb::Cluster;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{ConnectOptions, PgConnection, PgPool};
use std::os::unix::process::CommandExt;
use std::time::Duration;

/// A server that does not answer at all is reported, not waited for.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

const BEHIND_C: &str = "the connection string behind -c";

/// The database that a command works on, and the schema in it. Nothing is connected yet.
#[derive(Debug, Clone)]
pub(crate) struct Database {
    options: PgConnectOptions,
    schema: String,
}

impl Database {
    /// The flag wins over the environment, the environment over the file, the file over what the application says, and that
    /// over a `dev` that runs in the current folder.
    pub(crate) fn find(
        flag: Option<&str>,
        file: Option<&str>,
        application: Option<PgConnectOptions>,
        schema: &str,
    ) -> Result<Database, Failure> {
        let from_environment = std::env::var("DATABASE_URL").ok().filter(|url| !url.is_empty());
        let has_pg_variables = std::env::var_os("PGDATABASE").is_some_and(|name| !name.is_empty());
        let options = match (flag, from_environment, file) {
            (Some(text), _, _) => parse(BEHIND_C, text)?,
            (None, Some(text), _) => parse("DATABASE_URL", &text)?,
            (None, None, _) if has_pg_variables => PgConnectOptions::new(),
            (None, None, Some(text)) => parse("the connection of the configuration file", text)?,
            (None, None, None) => match (application, Cluster::url_if_running(dev::FOLDER, "postgres")) {
                (Some(options), _) => options,
                // `dev` runs in this folder.
                (None, Some(url)) => parse("the connection of `dev`", &url)?,
                (None, None) => {
                    let message = "no database given: use -c URL, or set DATABASE_URL, or PGDATABASE and its like";
                    return Err(Failure::Usage(message.to_owned()));
                }
            },
        };
        Ok(Database::new(options, schema))
    }

    pub(crate) fn new(options: PgConnectOptions, schema: &str) -> Database {
        Database { options: options.application_name("graphile-worker"), schema: schema.to_owned() }
    }

    /// The schema that Graphile Worker is in.
    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    /// Host and port, or the socket: for messages.
    pub(crate) fn server(&self) -> String {
        match self.options.get_socket() {
            Some(socket) => format!("{}:{}", socket.display(), self.options.get_port()),
            None => format!("{}:{}", self.options.get_host(), self.options.get_port()),
        }
    }

    /// One connection.
    pub(crate) async fn connect(&self) -> Result<PgConnection, Failure> {
        self.in_time(self.options.connect()).await
    }

    /// A pool whose first connection is made: where that fails, we know now.
    pub(crate) async fn pool(&self, max_connections: u32) -> Result<PgPool, Failure> {
        // The pool's own attempts go on where a server refuses; a plain connection says why at once.
        let connection = self.connect().await?;
        let pool = self.lazy_pool(max_connections);
        let _ = sqlx::Connection::close(connection).await;
        Ok(pool)
    }

    /// A pool that connects when it is first used.
    pub(crate) fn lazy_pool(&self, max_connections: u32) -> PgPool {
        PgPoolOptions::new().max_connections(max_connections).connect_lazy_with(self.options.clone())
    }

    async fn in_time<T>(&self, connecting: impl Future<Output = sqlx::Result<T>>) -> Result<T, Failure> {
        let server = self.server();
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.map_err(|_| {
            format!("could not connect to {server}: no answer in {} seconds", CONNECT_TIMEOUT.as_secs())
        })?;
        Ok(connected.map_err(|error| format!("could not connect to {server}: {}", explain(&error)))?)
    }
}

/// A password on the command line can be read by everybody on the machine. Where there is one, the program becomes itself
/// again with the connection string in its environment; returns where there is nothing to hide.
pub(crate) fn keep_out_of_sight(connection: &str) -> Result<(), Failure> {
    parse(BEHIND_C, connection)?;
    if !has_password(connection) {
        return Ok(());
    }
    let arguments: Option<Vec<String>> =
        std::env::args_os().skip(1).map(|argument| argument.into_string().ok()).collect();
    let Some(arguments) = arguments else { return Ok(()) };
    let program = std::env::current_exe().map_err(|error| format!("could not find this program: {error}"))?;
    let mut command = std::process::Command::new(program);
    command.args(without(arguments, connection)).env("DATABASE_URL", connection);
    Err(Failure::because(format!("could not start this program again: {}", command.exec())))
}

fn has_password(connection: &str) -> bool {
    let Some((_, rest)) = connection.split_once("://") else { return false };
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let in_authority = authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'));
    in_authority || connection.contains("password=")
}

/// The arguments without `-c` and what is behind it, however they are written.
fn without(arguments: Vec<String>, connection: &str) -> Vec<String> {
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

/// A URL, or as in Node the bare name of a database. The parser's own message may quote the password, so ours says
/// nothing of what it found.
fn parse(place: &str, text: &str) -> Result<PgConnectOptions, Failure> {
    let wrong = || {
        Failure::Usage(format!(
            "{place} is not a URL such as postgres://user:password@host:5432/database, with special characters in the \
             password percent-encoded"
        ))
    };
    let is_name = !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
    if is_name {
        return Ok(PgConnectOptions::new().database(text));
    }
    if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
        return Err(wrong());
    }
    let options: PgConnectOptions = text.parse().map_err(|_| wrong())?;
    Ok(if wants_ssl(text) { options.ssl_mode(PgSslMode::Require) } else { options })
}

/// `ssl=true` is how Node's drivers spell `sslmode=require`.
fn wants_ssl(url: &str) -> bool {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    query.split('&').any(|pair| ["ssl=true", "ssl=1"].contains(&pair))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_leaves_the_command_line_with_its_flag_and_nothing_else() {
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
            assert_eq!(without(arguments, url), kept);
        }
        for (text, has) in [
            (url, true),
            ("postgres://u@h:5432/d", false),
            ("postgres://h/d?user=u&password=p", true),
            ("postgres://h:5432/d", false),
            ("my_db", false),
        ] {
            assert_eq!(has_password(text), has, "{text}");
        }
    }

    #[test]
    fn a_bare_name_is_a_database() {
        assert_eq!(parse("here", "my_db").expect("a name").get_database(), Some("my_db"));
    }

    #[test]
    fn ssl_of_nodes_drivers_is_understood() {
        for (url, required) in [("postgres://host/db?ssl=true", true), ("postgres://host/db?a=b&ssl=1", true)] {
            let options = parse("here", url).expect("a URL");
            assert_eq!(matches!(options.get_ssl_mode(), PgSslMode::Require), required, "{url}");
        }
        assert!(matches!(parse("here", "postgres://host/db").expect("a URL").get_ssl_mode(), PgSslMode::Prefer));
    }

    #[test]
    fn what_is_no_url_is_not_quoted() {
        for text in ["http://user:secret@host/db", "postgres://user:secret@host:port/db", "user:secret@host", ""] {
            let Err(Failure::Usage(message)) = parse("DATABASE_URL", text) else { panic!("{text} was taken") };
            assert!(message.starts_with("DATABASE_URL is not a URL") && !message.contains("secret"), "{message}");
        }
    }
}
