//! `dev`: a private PostgreSQL in ./.graphile-worker, with the schema in it and a worker on it. It ends with us.

use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print;
use crate::run::{self, Application};
use crate::settings::RunSettings;
use crate::signals::Signals;
use graphile_worker_devdb::{Cluster, ClusterOptions};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

/// Where its PostgreSQL is.
pub(crate) const FOLDER: &str = ".graphile-worker";

/// Runs jobs on a database of our own until told to stop, and stops that, too.
pub(crate) async fn dev(
    application: Application,
    settings: &RunSettings,
    schema: &str,
    reset: bool,
    signals: &mut Signals,
) -> Result<(), Failure> {
    // What is wrong with tasks or the crontab is told before a server is started.
    let options = run::describe(application, settings)?;
    let folder = std::env::current_dir().map_err(|error| format!("there is no current folder: {error}"))?.join(FOLDER);
    let _only_us = take(&folder)?;
    let opening = ClusterOptions::new(&folder).fresh(reset);
    let cluster = signals.unless_told(async { Ok(tokio::task::spawn_blocking(|| opening.open()).await??) }).await?;
    if std::env::var("DATABASE_URL").as_deref() != Ok(&cluster.url("postgres")) {
        return Err(begin_again(&cluster));
    }
    let database = Database::new(cluster.options("postgres"), schema);
    let ended = async {
        signals.unless_told(install(&database)).await?;
        print(&greeting(&cluster, schema, &a_task(settings.tasks.path())))?;
        run::run(options, settings, &database, signals).await
    }
    .await;
    tokio::task::spawn_blocking(|| cluster.stop()).await??;
    ended
}

/// Holds the folder for as long as the file is open.
fn take(folder: &Path) -> Result<File, Failure> {
    let cannot = |error: std::io::Error| Failure::because(format!("cannot use {}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(cannot)?;
    std::fs::write(folder.join(".gitignore"), "*\n").map_err(cannot)?;
    let file = File::create(folder.join("dev")).map_err(cannot)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(_) => Err(Failure::because(format!(
            "another `graphile-worker dev` is at work in {}: stop that one, or go to another folder",
            folder.display()
        ))),
    }
}

/// Becomes the same program in an environment that leads to this database: tasks look there for theirs, and must not find
/// another. A process cannot change its own environment while it has threads. Returns only if that failed.
fn begin_again(cluster: &Cluster) -> Failure {
    let options = cluster.options("postgres");
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Failure::because(format!("could not find this program: {error}")),
    };
    let mut command = std::process::Command::new(program);
    command.args(std::env::args_os().skip(1).filter(|argument| argument != "--reset"));
    for variable in ["PGHOSTADDR", "PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSSLMODE", "PGOPTIONS"] {
        command.env_remove(variable);
    }
    if let Some(socket) = options.get_socket() {
        command.env("PGHOST", socket);
    }
    command.env("PGPORT", options.get_port().to_string()).env("PGUSER", "postgres").env("PGDATABASE", "postgres");
    command.env("DATABASE_URL", cluster.url("postgres"));
    Failure::because(format!("could not start this program again: {}", command.exec()))
}

async fn install(database: &Database) -> Result<(), Failure> {
    let mut connection = database.connect().await?;
    graphile_worker::migrate(&mut connection, database.schema()).await?;
    let _ = sqlx::Connection::close(connection).await;
    Ok(())
}

/// The name of a task that is there, for an example that works when it is pasted.
fn a_task(folder: &Path) -> String {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let executables = files
        .filter(|file| file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0));
    let names = executables.filter_map(|file| file.path().file_stem()?.to_str().map(str::to_owned));
    names.filter(|name| !name.contains('\'')).min().unwrap_or_else(|| "hello".to_owned())
}

fn greeting(cluster: &Cluster, schema: &str, task: &str) -> String {
    let plain = schema.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && schema.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let schema = if plain { schema.to_owned() } else { format!("\"{}\"", schema.replace('"', "\"\"")) };
    let options = cluster.options("postgres");
    // Over the socket no password is asked for, so that none is on a command line.
    let socket = options.get_socket().map(|socket| socket.display().to_string()).unwrap_or_default();
    format!(
        "PostgreSQL runs in {folder}, for as long as this does. For your application:\n\n\
         \x20   DATABASE_URL={url}\n\n\
         To add a job, start psql and paste the second line:\n\n\
         \x20   psql -h '{socket}' -p {port} -U postgres\n\
         \x20   select {schema}.add_job('{task}', '{{\"name\": \"world\"}}');\n\n",
        folder = cluster.folder().display(),
        url = cluster.url("postgres"),
        port = options.get_port(),
    )
}
