//! Finding the PostgreSQL programs, and choosing the user that runs them.

use crate::Error;
use crate::error::Context;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const NEEDED: [&str; 3] = ["initdb", "pg_ctl", "postgres"];

/// An installation of PostgreSQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programs {
    bin: PathBuf,
    major: String,
}

impl Programs {
    /// Finds an installation: `PGBIN`, then `PATH`, `pg_config --bindir`, `/usr/lib/postgresql/*/bin`
    /// (newest first), Homebrew, Postgres.app.
    pub fn find() -> Result<Programs, Error> {
        Programs::in_folder(&Places::of_this_machine().search()?)
    }

    /// The installation in this folder.
    pub fn in_folder(bin: &Path) -> Result<Programs, Error> {
        let output = Command::new(bin.join("postgres"))
            .arg("--version")
            .output()
            .context(|| format!("run {}", bin.join("postgres").display()))?;
        let major = major_version(&String::from_utf8_lossy(&output.stdout));
        Ok(Programs { bin: bin.to_owned(), major })
    }

    /// The folder with `initdb`, `pg_ctl` and `postgres`.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// The major version, such as `15`.
    pub fn major(&self) -> &str {
        &self.major
    }

    pub(crate) fn command(&self, program: &str, user: &ServerUser) -> Command {
        let mut command = Command::new(self.bin.join(program));
        if let ServerUser::Other { uid, gid, .. } = user {
            command.uid(*uid).gid(*gid);
        }
        // A server must not take its settings or its locale from the process that happened to start it.
        for (name, _) in std::env::vars_os() {
            let inherited = name.to_string_lossy();
            if inherited.starts_with("PG") || inherited.starts_with("LC_") || inherited == "LANG" {
                command.env_remove(&name);
            }
        }
        // The other user may not be able to enter the current folder.
        command.current_dir("/").env("LC_ALL", "C").stdin(Stdio::null());
        command
    }
}

/// "postgres (PostgreSQL) 15.18 (Debian …)" is 15, "… 18beta1" is 18.
fn major_version(output: &str) -> String {
    output
        .split_whitespace()
        .find_map(|word| {
            let digits: String = word.chars().take_while(char::is_ascii_digit).collect();
            (!digits.is_empty()).then_some(digits)
        })
        .unwrap_or_default()
}

/// Where [`Programs::find`] searches, so that a test can replace it.
struct Places {
    pgbin: Option<PathBuf>,
    path: Option<OsString>,
    pg_config_bindir: Option<PathBuf>,
    root: PathBuf,
}

impl Places {
    fn of_this_machine() -> Places {
        let pg_config = Command::new("pg_config").arg("--bindir").stderr(Stdio::null()).output();
        Places {
            pgbin: std::env::var_os("PGBIN").filter(|value| !value.is_empty()).map(PathBuf::from),
            path: std::env::var_os("PATH"),
            pg_config_bindir: pg_config
                .ok()
                .filter(|output| output.status.success())
                .map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())),
            root: PathBuf::from("/"),
        }
    }

    fn search(&self) -> Result<PathBuf, Error> {
        if let Some(folder) = &self.pgbin {
            return match NEEDED.into_iter().find(|program| !folder.join(program).is_file()) {
                Some(missing) => Err(Error::WrongPgbin { folder: folder.clone(), missing }),
                None => Ok(folder.clone()),
            };
        }
        let on_path = self.path.iter().flat_map(std::env::split_paths);
        on_path
            .chain(self.pg_config_bindir.clone())
            .chain(self.newest_first("usr/lib/postgresql", "", "bin"))
            .chain(self.newest_first("usr", "pgsql-", "bin"))
            .chain(self.newest_first("opt/homebrew/opt", "postgresql@", "bin"))
            .chain(self.newest_first("usr/local/opt", "postgresql@", "bin"))
            .chain(self.newest_first("Applications/Postgres.app/Contents/Versions", "", "bin"))
            .find(|folder| NEEDED.into_iter().all(|program| folder.join(program).is_file()))
            .ok_or(Error::NotInstalled)
    }

    /// `root/parent/<prefix><version>/child` for every version.
    fn newest_first(&self, parent: &str, prefix: &str, child: &str) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.root.join(parent)) else {
            return Vec::new();
        };
        let mut versions: Vec<(u32, PathBuf)> = entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name();
                let version = name.to_str()?.strip_prefix(prefix)?.split('.').next()?.parse().ok()?;
                Some((version, entry.path().join(child)))
            })
            .collect();
        versions.sort_by(|a, b| b.cmp(a));
        versions.into_iter().map(|(_, folder)| folder).collect()
    }
}

/// The user that runs the server.
#[derive(Debug, Clone)]
pub(crate) enum ServerUser {
    /// The current user.
    Ourselves,
    /// We are root, and PostgreSQL does not run as root.
    Other { name: String, uid: u32, gid: u32 },
}

impl ServerUser {
    pub(crate) fn choose() -> Result<ServerUser, Error> {
        if current_user_id()? != 0 {
            return Ok(ServerUser::Ourselves);
        }
        for name in ["postgres", "nobody"] {
            if let (Some(uid), Some(gid)) = (id(&["-u", name])?, id(&["-g", name])?) {
                return Ok(ServerUser::Other { name: name.to_owned(), uid, gid });
            }
        }
        Err(Error::Program {
            program: "id",
            output: "PostgreSQL cannot run as root, and there is no user `postgres` or `nobody`".to_owned(),
        })
    }
}

pub(crate) fn current_user_id() -> Result<u32, Error> {
    let failed = || Error::Program { program: "id", output: "could not determine the current user".to_owned() };
    id(&["-u"])?.ok_or_else(failed)
}

/// The output of `id`; `None` if the user does not exist.
fn id(arguments: &[&str]) -> Result<Option<u32>, Error> {
    let output = Command::new("id").args(arguments).output().context(|| "run `id`".to_owned())?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Root {
            let folder = std::env::temp_dir().join(format!("gw-programs-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&folder).expect("a folder for the test");
            Root(folder)
        }

        fn installation(&self, folder: &str) -> PathBuf {
            let folder = self.0.join(folder);
            std::fs::create_dir_all(&folder).expect("a folder for the test");
            for program in NEEDED {
                std::fs::write(folder.join(program), "").expect("a file for the test");
            }
            folder
        }

        fn places(&self) -> Places {
            Places { pgbin: None, path: None, pg_config_bindir: None, root: self.0.clone() }
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn debian_versions_are_compared_as_numbers() {
        let root = Root::new("debian");
        root.installation("usr/lib/postgresql/9.6/bin");
        let newest = root.installation("usr/lib/postgresql/17/bin");
        root.installation("usr/lib/postgresql/15/bin");
        assert_eq!(root.places().search().expect("found"), newest);
    }

    #[test]
    fn pgbin_wins_over_path_and_path_over_the_rest() {
        let root = Root::new("order");
        let system = root.installation("usr/lib/postgresql/15/bin");
        let pg_config = root.installation("from-pg-config");
        let on_path = root.installation("on-path");
        let pgbin = root.installation("pgbin");

        let mut places = root.places();
        assert_eq!(places.search().expect("found"), system);
        places.pg_config_bindir = Some(pg_config.clone());
        assert_eq!(places.search().expect("found"), pg_config);
        places.path = Some(std::env::join_paths([root.0.join("nothing"), on_path.clone()]).expect("a path"));
        assert_eq!(places.search().expect("found"), on_path);
        places.pgbin = Some(pgbin.clone());
        assert_eq!(places.search().expect("found"), pgbin);
    }

    #[test]
    fn homebrew_and_postgres_app_are_found() {
        for folder in [
            "opt/homebrew/opt/postgresql@17/bin",
            "usr/local/opt/postgresql@16/bin",
            "Applications/Postgres.app/Contents/Versions/16/bin",
            "usr/pgsql-16/bin",
        ] {
            let root = Root::new("mac");
            let installation = root.installation(folder);
            assert_eq!(root.places().search().expect("found"), installation);
        }
    }

    #[test]
    fn an_installation_without_the_server_is_skipped() {
        let root = Root::new("client-only");
        std::fs::remove_file(root.installation("usr/lib/postgresql/17/bin").join("postgres")).expect("removed");
        let whole = root.installation("usr/lib/postgresql/15/bin");
        assert_eq!(root.places().search().expect("found"), whole);
    }

    #[test]
    fn without_postgresql_the_error_says_how_to_install_it() {
        let root = Root::new("none");
        let message = root.places().search().expect_err("nothing to find").to_string();
        for command in ["apt-get install postgresql", "dnf install postgresql-server", "brew install postgresql"] {
            assert!(message.contains(command), "{message}");
        }
    }

    #[test]
    fn a_wrong_pgbin_is_an_error_even_if_path_has_an_installation() {
        let root = Root::new("pgbin");
        root.installation("usr/lib/postgresql/15/bin");
        let mut places = root.places();
        places.pgbin = Some(root.0.join("empty"));
        let message = places.search().expect_err("a wrong PGBIN").to_string();
        assert!(message.contains("does not contain initdb"), "{message}");
    }

    #[test]
    fn major_versions_are_parsed_from_the_output_of_postgres() {
        assert_eq!(major_version("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), "15");
        assert_eq!(major_version("postgres (PostgreSQL) 18beta1\n"), "18");
    }
}
