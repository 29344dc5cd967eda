// Runs before the first paint, so that the other theme never flashes. The default is the system's theme.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  const chosen = localStorage.getItem("jetspec-theme");
  if (chosen) root.dataset.theme = chosen;

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", String(isDark()));
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      const isSystems = (theme === "dark") === system.matches;
      if (isSystems) {
        delete root.dataset.theme;
        localStorage.removeItem("jetspec-theme");
      } else {
        root.dataset.theme = theme;
        localStorage.setItem("jetspec-theme", theme);
      }
      show();
    });
    system.addEventListener("change", show);
    show();
  });
})();
