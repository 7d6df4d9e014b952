//! `dormouse rmi`

use anyhow::{Result, bail};
use dormouse_kernel::ErrorKind;

use crate::command::Global;
use crate::{fail, output};

/// Remove names of images, and images without another name
///
/// 'dormouse prune' frees the space. The exit code is 1 if there is no such image and 2 if a
/// container is made from it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Remove the image with all its names; missing images are no error
    #[arg(long, short)]
    force: bool,
    /// All images
    #[arg(long, short)]
    all: bool,
    /// Names or ids
    #[arg(value_name = "IMAGE")]
    names: Vec<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let store = engine.images()?;
    let mut names = args.names;
    match (args.all, names.is_empty()) {
        (true, false) => bail!("give either --all or images, not both"),
        (false, true) => bail!("no image was given: name some, or --all"),
        (true, true) => names = store.list()?.into_iter().map(|i| i.id).collect(),
        (false, false) => {}
    }
    // They have their image mounted.
    engine.dismiss_spares();
    let in_use = engine.images_in_use()?;
    Ok(fail::for_each(&names, |name| {
        let image = match store.find(name) {
            Ok(image) => image,
            Err(e) if e.kind() == ErrorKind::NotFound && args.force => return Ok(()),
            Err(e) if e.kind() == ErrorKind::NotFound => return Err(fail::exit(1, e.to_string())),
            Err(e) => return Err(e.into()),
        };
        let given = image.given_name(name).cloned();
        if let Some(reference) = given.filter(|_| image.names.len() > 1 && !args.force) {
            store.untag(&reference)?;
            return output::line(&format!("untagged {reference}"));
        }
        if in_use.contains(&image.id) {
            let text =
                format!("image '{name}' is in use: remove the containers made from it first");
            return Err(fail::exit(2, text));
        }
        store.remove(&image)?;
        for name in &image.names {
            output::line(&format!("untagged {name}"))?;
        }
        output::line(&format!("removed {}", image.id))
    }))
}
