// Examples of the site: long lines wrap, and a button copies; of a session, only the commands.
const style = document.createElement("style");
style.textContent = `div.highlight { position: relative } div.highlight pre { white-space: pre-wrap }
  button.copy { position: absolute; top: .3rem; right: .3rem; opacity: .6 } button.copy:hover, button.copy:focus { opacity: 1 }`;
document.head.append(style);
addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    Object.assign(button, { className: "copy", type: "button", textContent: "Copy" });
    const lines = block.innerText.trim().split("\n");
    let goesOn = false;
    const commands = lines.filter((line) => {
      const isCommand = goesOn || line.startsWith("$ ");
      goesOn = isCommand && line.endsWith("\\");
      return isCommand;
    }).map((line) => line.replace(/^\$ /, ""));
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText((commands.length ? commands : lines).join("\n"));
      button.textContent = "Copied";
    });
    block.append(button);
  }
});
